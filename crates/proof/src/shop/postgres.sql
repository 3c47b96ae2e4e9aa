-- The business: whose next order has which number, the orders, and what the handler did.
CREATE TABLE customers (customer text PRIMARY KEY, n bigint NOT NULL DEFAULT 0);
CREATE TABLE orders (customer text, n bigint, PRIMARY KEY (customer, n));
CREATE TABLE effects (position bigserial PRIMARY KEY, message_id text, customer text, n bigint);
