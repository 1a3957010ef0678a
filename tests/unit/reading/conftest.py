from backends import clouds, folder, folder_url, shared_clouds

__all__ = ["clouds", "folder", "folder_url", "shared_clouds"]
