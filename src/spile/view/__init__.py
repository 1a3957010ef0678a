"""Terminal displays and reports."""
