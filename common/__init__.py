"""Tools of lesson/ and experiments/, which train_math.py never imports."""
