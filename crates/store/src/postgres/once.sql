SELECT postrider_once($1, $2::uuid, $3, $4, $5, $6)
