"""What users ask: answers that repeat the question's text, and answers that can't."""

from __future__ import annotations

_JSON = """{
  "name": "weather-station",
  "version": "1.4.2",
  "owner": {"name": "Maria Lindqvist", "email": "maria.lindqvist@example.org"},
  "sensors": [
    {"id": "t-01", "kind": "temperature", "unit": "celsius", "interval_s": 60, "enabled": true},
    {"id": "h-01", "kind": "humidity", "unit": "percent", "interval_s": 60, "enabled": true},
    {"id": "p-01", "kind": "pressure", "unit": "hPa", "interval_s": 300, "enabled": false}
  ],
  "storage": {"path": "/var/lib/weather", "keep_days": 90}
}"""

_SMALL_JSON = """{
  "name": "weather-station",
  "version": "1.4.2",
  "author": "Maria Lindqvist",
  "email": "maria.lindqvist@example.org",
  "host": "weather.example.org",
  "port": 8080,
  "path": "/var/lib/weather",
  "keep_days": 90,
  "interval_seconds": 60,
  "units": "metric",
  "language": "sv",
  "alarms": true
}"""

_CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("The amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("The balance is too low")
        self.balance -= amount
        return self.balance"""

_ARTICLE = (
    "The Museum of Navigation in Tromsø opened its new wing on Saturday. The wing was "
    "designed by the architect Ingrid Solberg and took four years to build. It holds more "
    'than two thousand charts, the oldest of which was drawn in 1587. "We wanted a building '
    'that looks like a ship pulled ashore," Solberg said at the opening. Visitors can walk '
    "through the hull of a restored fishing boat and try to find their way by the stars in a "
    "small planetarium. The museum expects eighty thousand visitors in the first year. "
    "Entrance is free for children, and on Thursdays it is free for everybody."
)

_CSV = """name,city,born,instrument
Anna Berg,Oslo,1984,violin
Jonas Weber,Hamburg,1979,cello
Lucia Romano,Bologna,1991,oboe
Peter Novak,Brno,1968,double bass
Sofia Costa,Porto,1988,viola
Emil Larsen,Aarhus,1995,French horn"""

#: Small changes and extracts: most of the answer stands in the question.
COPY_HEAVY = (
    f"This is my configuration:\n\n```json\n{_JSON}\n```\n\n"
    'Rewrite the configuration with "keep_days": 30.',
    f"Copy the following JSON and replace 8080 with 9090.\n\n{_SMALL_JSON}",
    f"This is my Python code:\n\n```python\n{_CODE}\n```\n\n"
    "Rewrite the code with the class renamed to BankAccount.",
    f"Proofread the following text and give it back corrected.\n\n{_ARTICLE}",
    f"Quote the first four sentences of this article word for word.\n\n{_ARTICLE}",
    f"Rewrite this CSV table as a Markdown table with the same columns.\n\n{_CSV}",
)

#: Nothing of the answer stands in the question.
OPEN = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I cook tonight with little time?",
    "Explain to a child how a refrigerator works.",
)
