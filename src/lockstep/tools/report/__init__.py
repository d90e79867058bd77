"""A run in one file that any browser shows without a network: what is in it (numbers.py, logged.py), how it is drawn
(scales.py, drawing.py, pixels.py), and the page that holds it all (page.py; page.html, page.css, page.js).
"""
