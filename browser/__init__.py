"""The page of scripts/browse.py: shards and runs, to be looked into.

| file         | takes                                | gives                                                                 |
|--------------|--------------------------------------|-----------------------------------------------------------------------|
| library.py   | shards, what checks found in them    | sets of samples: by number, by key, by class, the broken ones         |
| run_pages.py | a folder of runs                     | their curves and their bad samples                                    |
| charts.py    | numbers                              | SVG                                                                   |
| contents.py  | the bytes of a field                 | what a page may show of them: a re-drawn picture, text, JSON, a player |
| app.py       | all of the above                     | the Flask application: routes, and what no request may do             |

Invariant: it only reads. Whatever comes from a tar is text that is escaped, a picture that is drawn anew, or a clip or sound that is sent
under a fixed type; nothing of it is ever sent as a page, a script or a style.
"""
