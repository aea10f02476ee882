"""`mkgen report`: one HTML page that holds a plan, its predicted step and the checker's verdict, and needs no network.

Every module of this package computes one part as plain data; `page.py` puts them together, `templates/report/` lays them out.
"""
