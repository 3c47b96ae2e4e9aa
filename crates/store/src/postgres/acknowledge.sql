SELECT postrider_acknowledge($1, $2::uuid)
