# RabbitMQ in the foreground, with everything that usually is the machine's as its own:
# rabbitmq.sh <data folder> <port> <port of epmd> <port of the distribution> <more settings>
#
# Its management answers at the same port of 127.0.0.2: whoever knows the one knows the other. `ctl` in the data
# folder is rabbitmqctl for this node.
set -eu
data=$1 port=$2 epmd_port=$3 distribution_port=$4 more=$5
mkdir -p "$data/log" "$data/mnesia"

cat >"$data/rabbitmq.conf" <<END
listeners.tcp.1 = 127.0.0.1:$port
management.tcp.ip = 127.0.0.2
management.tcp.port = $port
# The disk of a test machine is nearly full more often than not; an alarm would stop every publisher.
disk_free_limit.absolute = 10MB
$more
END
echo '[rabbitmq_management].' >"$data/enabled_plugins"

# Written down, because `ctl` needs the same.
cat >"$data/environment" <<END
export HOME='$data' RABBITMQ_NODENAME='$(cat "$data/node")@localhost' RABBITMQ_CONF_ENV_FILE=/dev/null
export RABBITMQ_CONFIG_FILE='$data/rabbitmq.conf' RABBITMQ_ENABLED_PLUGINS_FILE='$data/enabled_plugins'
export RABBITMQ_MNESIA_BASE='$data/mnesia' RABBITMQ_LOG_BASE='$data/log' RABBITMQ_DIST_PORT=$distribution_port
export ERL_EPMD_ADDRESS=127.0.0.1 ERL_EPMD_PORT=$epmd_port
END
printf '. "%s/environment"\nexec /usr/lib/rabbitmq/bin/rabbitmqctl "$@"\n' "$data" >"$data/ctl"
. "$data/environment"
# Otherwise it listens on every address of the machine.
export RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {127,0,0,1}'

# Started here, and not by the first node that misses it, so that it ends with its server.
epmd -address 127.0.0.1 -port "$epmd_port" &
epmd=$!
# Debian's own wrapper in /usr/sbin changes the user and forgets the environment.
/usr/lib/rabbitmq/bin/rabbitmq-server &
server=$!
trap 'kill -s TERM "$server"' TERM INT
status=0
# A wait that a signal ends is not yet the end of the server.
while kill -s 0 "$server" 2>/dev/null; do
    status=0
    wait "$server" || status=$?
done
kill "$epmd"
exit "$status"
