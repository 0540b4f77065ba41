"""What watches processes: starting ranks, hang detection, restarts, spot notices."""
