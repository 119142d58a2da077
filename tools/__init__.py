"""Tools of lesson/ and evidence/, which train_math.py never imports."""
