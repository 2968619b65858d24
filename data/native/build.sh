#!/bin/sh
# Build samples.so and jpeg.so beside this file, where they are missing or of other C files: nothing without a compiler, and only the first
# without libjpeg-turbo's header. CC and CFLAGS may be set from outside.
set -eu
cd "$(dirname "$0")"
: "${CC:=cc}"
command -v "$CC" >/dev/null 2>&1 || exit 0
sources=$(LC_ALL=C ls -- *.c *.h)
# shellcheck disable=SC2086
hash=$(cat $sources | sha256sum | cut -d' ' -f1)

build() { # build LIBRARY ARGUMENTS...
    library=$1
    shift
    if [ -f "$library" ] && grep -q "$hash" "$library"; then return; fi
    # a temporary name and a rename: a process that has the old one loaded keeps it
    "$CC" -O3 -g1 -fPIC -shared -Wall -Wextra ${CFLAGS:-} -DSOURCES="\"$hash\"" -o "$library.part" "$@"
    mv -f "$library.part" "$library"
    echo "built data/native/$library"
}

build samples.so samples.c
printf '#include <stdio.h>\n#include <jpeglib.h>\n#ifndef LIBJPEG_TURBO_VERSION_NUMBER\n#error not libjpeg-turbo\n#endif\n' |
    "$CC" -fsyntax-only -x c - >/dev/null 2>&1 || exit 0
# shellcheck disable=SC2046
build jpeg.so $(LC_ALL=C ls -- *.c | grep -v '^samples\.c$') -ljpeg -lm
