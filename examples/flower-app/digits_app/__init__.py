"""Digits in a federation: an ordinary Flower app, protected in a few lines."""
