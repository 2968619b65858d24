#!/bin/sh
# Build jpeg.so beside this file, where it is older than the C files or missing; without a compiler or libjpeg-turbo's header: nothing.
# CC, CFLAGS and OUT may be set from outside.
set -eu
cd "$(dirname "$0")"
: "${CC:=cc}" "${OUT:=jpeg.so}"
command -v "$CC" >/dev/null 2>&1 || exit 0
printf '#include <stdio.h>\n#include <jpeglib.h>\n#ifndef LIBJPEG_TURBO_VERSION_NUMBER\n#error not libjpeg-turbo\n#endif\n' |
    "$CC" -fsyntax-only -x c - >/dev/null 2>&1 || exit 0
sources=$(LC_ALL=C ls -- *.c *.h)
# shellcheck disable=SC2086
hash=$(cat $sources | sha256sum | cut -d' ' -f1)
if [ -f "$OUT" ] && grep -q "$hash" "$OUT"; then exit 0; fi
# a temporary name and a rename: a process that has the old one loaded keeps it
"$CC" -O3 -g1 -fPIC -shared -Wall -Wextra ${CFLAGS:-} -DSOURCES="\"$hash\"" -o "$OUT.part" ./*.c -ljpeg -lm
mv -f "$OUT.part" "$OUT"
echo "built data/native/$OUT"
