"""What the lessons import: data, models, measuring, predicting, bounds, pictures. Never a technique."""

__version__ = "0.1.0"
