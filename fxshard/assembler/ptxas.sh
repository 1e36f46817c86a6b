#!/bin/sh
# A ptxas that adds pairs of 16-bit integers one by one; fxshard/assembler/__init__.py says why.
# FXSHARD_PTXAS is the real one.  What --version says is in the key of Triton's cache.
apart='\1{ .reg .b16 a, b, c, d; .reg .b32 x, y; mov.b32 x, \4; mov.b32 {a, b}, x; mov.b32 y, \5; mov.b32 {c, d}, y; '
apart=$apart'add.s16 a, a, c; add.s16 b, b, d; \2mov.b32 \3, {a, b}; }'
for argument in "$@"; do
    case $argument in
    --version)
        "$FXSHARD_PTXAS" --version && echo 'pairs of 16-bit integers taken apart by fxshard'
        exit
        ;;
    *.ptx)
        sed -E -i "s/^([[:space:]]*)(@!?%p[0-9]+[[:space:]]+)?add\.[su]16x2[[:space:]]+(%r[0-9]+), ([^,;]+), ([^,;]+);/$apart/" "$argument" || exit
        ;;
    esac
done
exec "$FXSHARD_PTXAS" "$@"
