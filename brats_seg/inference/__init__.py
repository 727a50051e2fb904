"""From new scans to label maps on their own grids."""
