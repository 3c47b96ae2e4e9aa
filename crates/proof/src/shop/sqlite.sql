-- The business: whose next order has which number, the orders, and what the handler did.
CREATE TABLE customers (customer TEXT PRIMARY KEY, n INTEGER NOT NULL DEFAULT 0) STRICT, WITHOUT ROWID;
CREATE TABLE orders (customer TEXT, n INTEGER, PRIMARY KEY (customer, n)) STRICT, WITHOUT ROWID;
CREATE TABLE effects (position INTEGER PRIMARY KEY AUTOINCREMENT, message_id TEXT, customer TEXT, n INTEGER) STRICT;
