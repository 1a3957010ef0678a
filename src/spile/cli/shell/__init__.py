"""What commands share: flags, aliases, the table of commands, mistakes."""
