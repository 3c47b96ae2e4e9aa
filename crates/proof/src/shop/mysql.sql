-- The business: whose next order has which number, the orders, and what the handler did
CREATE TABLE customers (customer VARCHAR(100) PRIMARY KEY, n BIGINT NOT NULL DEFAULT 0);
CREATE TABLE orders (customer VARCHAR(100), n BIGINT, PRIMARY KEY (customer, n));
CREATE TABLE effects (position BIGINT AUTO_INCREMENT PRIMARY KEY, message_id TEXT, customer VARCHAR(100), n BIGINT);
