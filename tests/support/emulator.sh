#!/bin/sh
# Makes FOLDER/python, a CPython for aarch64 that qemu emulates, of Debian's packages: `emulator.sh FOLDER`. They are
# unpacked there and not installed; what apt knows of this machine stays as it is.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
packages=$folder/packages

# fetch MACHINE PACKAGES: with all that they depend on
fetch() {
  own=$packages/$1
  mkdir -p "$own/lists/partial" "$own/archives/partial"
  : > "$own/status"
  options="-qq -y -o APT::Architecture=$1 -o APT::Architectures=$1 -o APT::Sandbox::User=root
    -o APT::Install-Recommends=false -o Debug::NoLocking=true -o Dir::State=$own -o Dir::State::status=$own/status
    -o Dir::Cache=$own"
  apt-get $options update
  apt-get $options --download-only install $2
}

fetch arm64 "python3 libstdc++6"
for package in "$packages"/arm64/archives/*.deb; do dpkg -x "$package" "$folder/root"; done
qemu=$(command -v qemu-aarch64-static || true)
if [ -z "$qemu" ]; then
  machine=$(dpkg --print-architecture)
  fetch "$machine" qemu-user-static
  dpkg --fsys-tarfile "$packages/$machine"/archives/qemu-user-static*.deb |
    tar -x -C "$folder" --strip-components=3 ./usr/bin/qemu-aarch64-static
  qemu=$folder/qemu-aarch64-static
fi
rm -rf "$packages"
cat > "$folder/python" << END
#!/bin/sh
# CPython for aarch64, emulated. Processes that it starts as sys.executable come here, too.
PYTHONHOME=$folder/root/usr exec $qemu -L $folder/root -0 $folder/python $folder/root/usr/bin/python3 "\$@"
END
chmod +x "$folder/python"
"$folder/python" -c 'import platform; assert platform.machine() == "aarch64"'
