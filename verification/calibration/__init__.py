"""What honest claims show, and the thresholds that follow."""
