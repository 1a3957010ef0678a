from backends import cloud_folder, cloud_url, clouds, folder, folder_url, shared_clouds

__all__ = ["cloud_folder", "cloud_url", "clouds", "folder", "folder_url", "shared_clouds"]
