from backends import folder, folder_url

__all__ = ["folder", "folder_url"]
