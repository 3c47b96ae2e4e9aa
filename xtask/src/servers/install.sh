# Installs the named Debian packages, asks nothing, and starts none of the servers in them.
set -eu
export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1

# Packages of servers start them at once unless this file forbids it. A machine that has one keeps its own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM HUP
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

install() {
    # Another apt-get may be at work, as after the start of a new machine.
    apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
}

if ! install "$@"; then
    echo "The lists of packages are missing or old: they are fetched, then once more."
    # Where one of several sources cannot be reached, the others may be enough: the install decides.
    apt-get update -q || true
    install "$@"
fi
