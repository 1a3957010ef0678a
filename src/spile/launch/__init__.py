"""Run workers: the supervisor and its engines."""
