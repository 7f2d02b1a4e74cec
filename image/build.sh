#!/bin/bash
# Builds the machine's file system as a folder, on a host with mmdebstrap, as root.
#
#   build.sh ROOT SUITE HOST
#
# ROOT  a folder that does not exist yet
# HOST  what the build must know of this host, all of it optional but apt.conf:
#         apt.conf      apt's settings for the build alone
#         sources.list  apt's sources; mmdebstrap's default mirror without it
#         ca.crt        the certificates this host trusts
#         npmrc         npm's registries
#         wheels/N      links to folders of wheels, which pip sees as /run/build/wheels/N
#
# The caller gives it a mount and a PID namespace of its own, so that a build
# killed at any point leaves neither mounts nor processes behind, and passes
# pip's and npm's settings in the environment. Progress is told in lines
# `::step SECONDS TITLE`, where SECONDS is how long that step usually takes.
set -euo pipefail
shopt -s nullglob dotglob

root=$1 suite=$2 host=$3
recipe=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

step() { printf '::step %s %s\n' "$1" "$2"; }

step 65 "Installing Debian packages"
sources=()
if [[ -e $host/sources.list ]]; then
    sources=("$host/sources.list")
fi
packages=$(sed -e 's/#.*//' "$recipe/packages.txt" | xargs | tr ' ' ',')
# A build that is cut short is thrown away, so dpkg need not sync every file.
mmdebstrap \
    --mode=root --format=directory --variant=minbase \
    --aptopt='APT::Install-Recommends "false"' --aptopt="$host/apt.conf" \
    --dpkgopt="$recipe/dpkg.cfg" --dpkgopt=force-unsafe-io \
    --include="$packages" \
    "$suite" "$root" "${sources[@]}" </dev/null

mount -t tmpfs -o mode=0755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
mkdir -m 1777 "$root/dev/shm"
for device in null zero full random urandom; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done

# On the tmpfs, so that nothing of the host can stay in the image.
mkdir -p "$root/run/build/wheels"
cp -R "$recipe" "$root/run/build/recipe"
for file in "$host"/ca.crt "$host"/npmrc /etc/resolv.conf /etc/hosts; do
    if [[ -e $file ]]; then
        cp --dereference "$file" "$root/run/build/"
    fi
done
for folder in "$host"/wheels/*; do
    mkdir "$root/run/build/wheels/${folder##*/}"
    mount --bind --options ro "$(readlink -f "$folder")" "$root/run/build/wheels/${folder##*/}"
done
for file in resolv.conf hosts; do
    rm -f "$root/etc/$file"
    touch "$root/etc/$file" "$root/run/build/$file"
    mount --bind "$root/run/build/$file" "$root/etc/$file"
done

chroot "$root" /bin/bash /run/build/recipe/provision.sh

step 2 "Sealing the file system"
umount --recursive "$root"/etc/resolv.conf "$root"/etc/hosts "$root"/dev "$root"/proc "$root"/tmp "$root"/run
rm -rf "${root:?}"/dev/* "${root:?}"/run/* "${root:?}"/tmp/*
printf '127.0.0.1 localhost\n127.0.0.1 cloche\n::1 localhost\n' >"$root/etc/hosts"
echo cloche >"$root/etc/hostname"
: >"$root/etc/resolv.conf"
: >"$root/etc/machine-id"
chmod 0644 "$root"/etc/{hosts,hostname,resolv.conf,machine-id}
