#!/usr/bin/env python3
"""Reads, checks and writes Megatron-Core `torch_dist` checkpoints with Python's standard library alone, without `pickle` or
`zipfile`: this file parses or makes every byte. It is independent of Ferry and of torch, and serves the tests as an oracle
for both.

    torch_dist_raw.py dump    FOLDER                   tensors, chunks, objects, common state
    torch_dist_raw.py check   FOLDER sha256.json       reassemble every tensor, compare its sha256
    torch_dist_raw.py rewrite FOLDER NEW_FOLDER [--tp N] [--files N] [--no-common-pt] [--no-common-state] [--no-crc]
                                                       read it, cut the tensors differently, write it anew
FOLDER is the folder of an iteration or the one that holds latest_checkpointed_iteration.txt.
"""
import argparse, hashlib, json, os, struct, sys, zlib

# ---------------------------------------------------------------------------------------------------------------
# 1. Unpickler: the opcodes that occur in .metadata (proto 4/5), data.pkl (proto 2) and common.pt
# ---------------------------------------------------------------------------------------------------------------
class Global:
    def __init__(s, m, n): s.name = m + "." + n
    def __repr__(s): return f"<{s.name}>"
    def __hash__(s): return hash(s.name)
    def __eq__(s, o): return isinstance(o, Global) and s.name == o.name

class Obj:
    """Result of NEWOBJ / REDUCE on a global: name + constructor args (+ BUILD state)."""
    def __init__(s, g, args): s.g, s.args, s.state, s.items, s.appended = g.name, args, None, {}, []
    def __repr__(s): return f"{s.g}{s.args!r}{'' if s.state is None else ' state=' + repr(s.state)}"
    def __getitem__(s, k): return s.state[k] if s.state is not None and k in s.state else s.items[k]
    def get(s, k, d=None): return (s.state or {}).get(k, d)
    def key(s): return (s.state.get("fqn"), size_of(s.state.get("offset")))
    def __hash__(s): return hash(s.key()) if s.g.endswith("MetadataIndex") else id(s)
    def __eq__(s, o): return isinstance(o, Obj) and (s is o or (s.g == o.g and s.g.endswith("MetadataIndex") and s.key() == o.key()))

class Pers:
    def __init__(s, pid): s.pid = pid
    def __repr__(s): return f"pers{s.pid!r}"

def size_of(o):
    """torch.Size((..)) -> tuple"""
    if o is None or isinstance(o, tuple): return o
    return tuple(o.args[0]) if isinstance(o, Obj) and o.args else ()

_MARK = object()

def unpickle(b):
    p, st, memo = 0, [], {}
    def rd(f):
        nonlocal p
        v = struct.unpack_from("<" + f, b, p)[0]; p += struct.calcsize("<" + f); return v
    def raw(n):
        nonlocal p
        v = bytes(b[p:p + n]); assert len(v) == n, "truncated pickle"; p += n; return v
    def line():
        nonlocal p
        e = bytes(b).index(b"\n", p); v = bytes(b[p:e]); p = e + 1; return v
    def popmark():
        i = len(st) - 1
        while st[i] is not _MARK: i -= 1
        r = st[i + 1:]; del st[i:]; return r
    def reduce_(f, a):
        if f.name in ("collections.OrderedDict", "builtins.dict") and not a: return {}
        if f.name == "builtins.set": return set(a[0])
        return Obj(f, a)
    while True:
        op = b[p]; p += 1
        c = bytes([op])
        if c == b".": return st.pop()
        elif c == b"\x80": rd("B")                                   # PROTO
        elif c == b"\x95": rd("Q")                                   # FRAME
        elif c == b"(": st.append(_MARK)
        elif c == b")": st.append(())
        elif c == b"]": st.append([])
        elif c == b"}": st.append({})
        elif c == b"\x8f": st.append(set())
        elif c == b"N": st.append(None)
        elif c == b"\x88": st.append(True)
        elif c == b"\x89": st.append(False)
        elif c == b"K": st.append(rd("B"))
        elif c == b"M": st.append(rd("H"))
        elif c == b"J": st.append(rd("i"))
        elif c == b"\x8a": n = rd("B"); st.append(int.from_bytes(raw(n), "little", signed=True))   # LONG1
        elif c == b"\x8b": n = rd("i"); st.append(int.from_bytes(raw(n), "little", signed=True))   # LONG4
        elif c == b"G": st.append(struct.unpack(">d", raw(8))[0])    # BINFLOAT is big endian
        elif c == b"X": st.append(raw(rd("I")).decode("utf-8", "surrogatepass"))
        elif c == b"\x8c": st.append(raw(rd("B")).decode("utf-8", "surrogatepass"))
        elif c == b"\x8d": st.append(raw(rd("Q")).decode("utf-8", "surrogatepass"))
        elif c == b"U": st.append(raw(rd("B")))
        elif c == b"T": st.append(raw(rd("i")))
        elif c == b"B": st.append(raw(rd("I")))
        elif c == b"C": st.append(raw(rd("B")))
        elif c == b"\x8e": st.append(raw(rd("Q")))
        elif c == b"\x96": st.append(bytearray(raw(rd("Q"))))        # BYTEARRAY8 (proto 5)
        elif c == b"q": memo[rd("B")] = st[-1]
        elif c == b"r": memo[rd("I")] = st[-1]
        elif c == b"\x94": memo[len(memo)] = st[-1]                  # MEMOIZE
        elif c == b"h": st.append(memo[rd("B")])
        elif c == b"j": st.append(memo[rd("I")])
        elif c == b"\x85": a = st.pop(); st.append((a,))
        elif c == b"\x86": y = st.pop(); x = st.pop(); st.append((x, y))
        elif c == b"\x87": z = st.pop(); y = st.pop(); x = st.pop(); st.append((x, y, z))
        elif c == b"t": st.append(tuple(popmark()))
        elif c == b"l": st.append(popmark())
        elif c == b"d": v = popmark(); st.append(dict(zip(v[::2], v[1::2])))
        elif c == b"a": v = st.pop(); (st[-1].appended if isinstance(st[-1], Obj) else st[-1]).append(v)
        elif c == b"e": v = popmark(); (st[-1].appended if isinstance(st[-1], Obj) else st[-1]).extend(v)
        elif c == b"\x90": v = popmark(); st[-1].update(v)           # ADDITEMS
        elif c == b"\x91": st.append(frozenset(popmark()))
        elif c == b"s": v = st.pop(); k = st.pop(); (st[-1].items if isinstance(st[-1], Obj) else st[-1])[k] = v
        elif c == b"u":
            v = popmark(); d = st[-1].items if isinstance(st[-1], Obj) else st[-1]
            d.update(zip(v[::2], v[1::2]))
        elif c == b"0": st.pop()
        elif c == b"1": popmark()
        elif c == b"2": st.append(st[-1])
        elif c == b"c": m = line().decode(); n = line().decode(); st.append(Global(m, n))
        elif c == b"\x93": n = st.pop(); m = st.pop(); st.append(Global(m, n))      # STACK_GLOBAL
        elif c == b"R": a = st.pop(); f = st.pop(); st.append(reduce_(f, a))
        elif c == b"\x81": a = st.pop(); f = st.pop(); st.append(Obj(f, a))         # NEWOBJ
        elif c == b"\x92": k = st.pop(); a = st.pop(); f = st.pop(); st.append(Obj(f, a))
        elif c == b"b":                                                             # BUILD
            s = st.pop(); o = st[-1]
            if isinstance(o, Obj):
                o.state = s if not (isinstance(s, tuple) and len(s) == 2 and isinstance(s[1], dict) and not s[0]) else s[1]
        elif c == b"Q": st.append(Pers(st.pop()))                                   # BINPERSID
        else: raise ValueError(f"pickle opcode {c!r} at {p - 1}")

# ---------------------------------------------------------------------------------------------------------------
# 2. torch.save zip container
# ---------------------------------------------------------------------------------------------------------------
def zip_entries(b):
    """{record name without archive prefix: (offset, size)} of a torch.save zip held in memoryview/bytes b."""
    n = len(b)
    i = bytes(b[max(0, n - 66000):]).rindex(b"PK\x05\x06") + max(0, n - 66000)
    cnt, cdsz, cdoff = struct.unpack_from("<HII", b, i + 10)
    if bytes(b[i - 20:i - 16]) == b"PK\x06\x07":                     # ZIP64 locator (torch always writes one)
        z = struct.unpack_from("<Q", b, i - 12)[0]
        assert bytes(b[z:z + 4]) == b"PK\x06\x06"
        cnt, cdsz, cdoff = struct.unpack_from("<QQQ", b, z + 32)
    out, p = {}, cdoff
    for _ in range(cnt):
        sig, _, _, flag, method, _, _, crc, cs, us, nl, el, cl, _, _, _, lh = struct.unpack_from("<IHHHHHHIIIHHHHHII", b, p)
        assert sig == 0x02014B50 and method == 0, "only stored entries occur"
        name = bytes(b[p + 46:p + 46 + nl]).decode()
        ex, e = p + 46 + nl, p + 46 + nl + el
        while ex + 4 <= e:                                            # ZIP64 extra: usize, csize, offset when 0xffffffff
            t, l = struct.unpack_from("<HH", b, ex)
            if t == 1:
                q = ex + 4
                if us == 0xFFFFFFFF: us = struct.unpack_from("<Q", b, q)[0]; q += 8
                if cs == 0xFFFFFFFF: cs = struct.unpack_from("<Q", b, q)[0]; q += 8
                if lh == 0xFFFFFFFF: lh = struct.unpack_from("<Q", b, q)[0]; q += 8
            ex += 4 + l
        lnl, lel = struct.unpack_from("<HH", b, lh + 26)
        out[name.split("/", 1)[1]] = (lh + 30 + lnl + lel, us)
        p += 46 + nl + el + cl
    return out

DTYPES = {"float32": ("FloatStorage", 4), "bfloat16": ("BFloat16Storage", 2), "float16": ("HalfStorage", 2),
          "float64": ("DoubleStorage", 8), "int64": ("LongStorage", 8), "int32": ("IntStorage", 4), "int16": ("ShortStorage", 2),
          "int8": ("CharStorage", 1), "uint8": ("ByteStorage", 1), "bool": ("BoolStorage", 1)}
ST2DT = {v[0]: k for k, v in DTYPES.items()}

def tensor_from_zip(b):
    """-> (dtype, shape, contiguous bytes) of a torch.save'd tensor"""
    ent = zip_entries(b)
    rec = lambda k: bytes(b[ent[k][0]:ent[k][0] + ent[k][1]])
    assert "byteorder" not in ent or rec("byteorder") == b"little"
    return tensor_of(unpickle(rec("data.pkl")), rec)

def tensor_of(o, rec):
    if o.g == "torch._tensor._rebuild_from_type_v2" or o.g == "torch._utils._rebuild_parameter":
        o = o.args[0] if o.g.endswith("parameter") else Obj(o.args[0], o.args[2])
    v3 = o.g == "torch._utils._rebuild_tensor_v3"                     # float8 and other storage-less dtypes
    assert o.g in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"), o.g
    pid = o.args[0].pid                                               # ('storage', torch.XStorage, '0', 'cpu', numel)
    assert pid[0] == "storage"
    dt = o.args[6].name.split(".")[-1] if v3 else ST2DT[pid[1].name.split(".")[-1]]
    es = 1 if dt.startswith("float8") else DTYPES[dt][1]
    off, shape, stride = o.args[1], tuple(o.args[2]), tuple(o.args[3])
    data = rec("data/" + pid[2])
    n = 1
    for s in shape: n *= s
    exp, cont = [], 1
    for s in reversed(shape): exp.insert(0, cont); cont *= s
    assert n == 0 or all(s == 1 or a == b for s, a, b in zip(shape, stride, exp)), "non-contiguous"
    return dt, shape, data[off * es:(off + n) * es]

# ---------------------------------------------------------------------------------------------------------------
# 3. Reader
# ---------------------------------------------------------------------------------------------------------------
class Checkpoint:
    def __init__(s, d, metadata=None):
        """metadata: the bytes of .metadata, where the caller has them already"""
        s.d = d
        md = unpickle(open(os.path.join(d, ".metadata"), "rb").read() if metadata is None else metadata)
        assert md.g.split(".")[-1] in ("Metadata", "MCoreMetadata"), md.g
        s.version, s.mcore_data = md.get("version"), md.get("mcore_data")
        s.extra_attrs = sorted(k for k in md.state if k not in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"))
        s.planner_data = md.get("planner_data")
        s.tensors, s.objects, s.store = {}, [], {}
        for k, v in md["state_dict_metadata"].items():
            if v.g.endswith("TensorStorageMetadata"):
                prop = v["properties"].state                          # (dtype, layout, requires_grad, memfmt, pin_memory)
                dt = (prop[0] if isinstance(prop, tuple) else prop["dtype"]).name.split(".")[-1]
                s.tensors[k] = (dt, size_of(v["size"]), [(size_of(c["offsets"]), size_of(c["sizes"])) for c in v["chunks"]])
            else:
                s.objects.append(k)
        for i, si in md["storage_data"].items():
            s.store[i.key()] = (si["relative_path"], si["offset"], si["length"], si.get("transform_descriptors"))
        s._f = {}
    def blob(s, fqn, off=None):
        path, o, n, tr = s.store[(fqn, off)]
        assert not tr, "stream transforms not supported"
        if path not in s._f: s._f[path] = open(os.path.join(s.d, path), "rb")
        s._f[path].seek(o)
        return memoryview(s._f[path].read(n))
    def tensor(s, key):
        dt, shape, chunks = s.tensors[key]
        es = 1 if dt.startswith("float8") else DTYPES[dt][1]
        n = 1
        for x in shape: n *= x
        out = bytearray(n * es)
        for off, sz in chunks:
            cdt, csh, data = tensor_from_zip(s.blob(key, off))
            assert cdt == dt and csh == tuple(sz), (key, cdt, csh, dt, sz)
            put(out, shape, off, sz, data, es)
        orig = ((s.mcore_data or {}).get(key) or {}).get("nd_reformulated_orig_global_shape")
        return (dt, *unflatten_nd(shape, tuple(orig), out, es)) if orig else (dt, shape, bytes(out))
    def object(s, key):
        b = s.blob(key); ent = zip_entries(b)
        return unpickle(bytes(b[ent["data.pkl"][0]:sum(ent["data.pkl"])]))
    def common(s):
        p = os.path.join(s.d, "common.pt")
        if os.path.exists(p):
            b = open(p, "rb").read(); ent = zip_entries(b)
            return unpickle(b[ent["data.pkl"][0]:sum(ent["data.pkl"])])
        return s.object("common_state/shard_0_1")[0] if "common_state/shard_0_1" in s.objects else {}

def unflatten_nd(shape, orig, buf, es):
    """megatron-core 0.9-0.15 `fully_sharded_model_space`: [G0..Gn] with local blocks [l0..ln] is stored as
    [G0/l0, .., Gn/ln, prod(l)], last axis = the flattened block. -> (orig shape, bytes)"""
    loc = tuple(g // n for g, n in zip(orig, shape[:-1]))
    out, m = bytearray(len(buf)), shape[-1] * es
    for i in range(len(buf) // m):
        idx, r = [], i
        for n in reversed(shape[:-1]): idx.insert(0, r % n); r //= n
        put(out, orig, tuple(a * l for a, l in zip(idx, loc)), loc, buf[i * m:(i + 1) * m], es)
    return orig, bytes(out)

def put(out, shape, off, sz, data, es):
    """copy an n-d box into a row-major buffer; innermost runs are contiguous"""
    nd = len(shape)
    if nd == 0: out[:] = data; return
    stride = [1] * nd
    for i in range(nd - 2, -1, -1): stride[i] = stride[i + 1] * shape[i + 1]
    run = sz[-1] * es
    if 0 in sz: return
    idx = [0] * (nd - 1); src = 0
    while True:
        d = (sum((o + i) * t for o, i, t in zip(off, idx, stride)) + off[-1]) * es
        out[d:d + run] = data[src:src + run]; src += run
        k = nd - 2
        while k >= 0:
            idx[k] += 1
            if idx[k] < sz[k]: break
            idx[k] = 0; k -= 1
        if k < 0: return

def get(buf, shape, off, sz, es):
    nd = len(shape)
    stride = [1] * nd
    for i in range(nd - 2, -1, -1): stride[i] = stride[i + 1] * shape[i + 1]
    out, idx, run = bytearray(), [0] * (nd - 1), sz[-1] * es
    while True:
        d = (sum((o + i) * t for o, i, t in zip(off, idx, stride)) + off[-1]) * es
        out += buf[d:d + run]
        k = nd - 2
        while k >= 0:
            idx[k] += 1
            if idx[k] < sz[k]: break
            idx[k] = 0; k -= 1
        if k < 0: return bytes(out)

# ---------------------------------------------------------------------------------------------------------------
# 4. Writer
# ---------------------------------------------------------------------------------------------------------------
class G:      # marker for a global in values passed to Pick
    def __init__(s, m, n): s.m, s.n = m, n
class Red:    # callable(args)
    def __init__(s, g, args): s.g, s.args = g, args
class New:    # cls.__new__(cls) + BUILD state
    def __init__(s, g, state): s.g, s.state = g, state
class Pid:
    def __init__(s, t): s.t = t

class Pick:
    """Protocol-2 emitter. Only globals and strings are memoised (LONG_BINPUT/LONG_BINGET); a reader needs no more."""
    def __init__(s): s.o, s.memo = bytearray(b"\x80\x02"), {}
    def _m(s, key, emit):
        if key in s.memo: s.o += b"j" + struct.pack("<I", s.memo[key]); return
        emit(); s.memo[key] = len(s.memo); s.o += b"r" + struct.pack("<I", s.memo[key])
    def put(s, v):
        o = s.o
        if v is None: o += b"N"
        elif v is True: o += b"\x88"
        elif v is False: o += b"\x89"
        elif isinstance(v, int):
            if 0 <= v < 256: o += b"K" + struct.pack("<B", v)
            elif -2**31 <= v < 2**31: o += b"J" + struct.pack("<i", v)
            else: r = v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True); o += b"\x8a" + bytes([len(r)]) + r
        elif isinstance(v, float): o += b"G" + struct.pack(">d", v)
        elif isinstance(v, str):
            r = v.encode()
            s._m(("s", v), lambda: o.extend(b"X" + struct.pack("<I", len(r)) + r))
        elif isinstance(v, G): s._m(("g", v.m, v.n), lambda: o.extend(f"c{v.m}\n{v.n}\n".encode()))
        elif isinstance(v, tuple):
            if len(v) == 0: o += b")"
            elif len(v) <= 3:
                for x in v: s.put(x)
                o += bytes([0x84 + len(v)])
            else:
                o += b"("
                for x in v: s.put(x)
                o += b"t"
        elif isinstance(v, list):
            o += b"]("
            for x in v: s.put(x)
            o += b"e"
        elif isinstance(v, dict) or hasattr(v, "pairs"):
            o += b"}("
            for k, x in (v.items() if isinstance(v, dict) else v.pairs): s.put(k); s.put(x)
            o += b"u"
        elif isinstance(v, Red): s.put(v.g); s.put(v.args); o += b"R"
        elif isinstance(v, New): s.put(v.g); o += b")\x81"; s.put(v.state); o += b"b"
        elif isinstance(v, Pid): s.put(v.t); o += b"Q"
        else: raise TypeError(type(v))
    def done(s, v): s.put(v); return bytes(s.o) + b"."

class Pairs:  # dict with unhashable keys, in order
    def __init__(s, pairs): s.pairs = pairs

DCP, FSM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
def Size(t): return Red(G("torch", "Size"), (tuple(int(x) for x in t),))

def zip_torch(records, archive="archive", crc=True):
    """Bytes of a torch.save zip: stored entries, payload 64-byte aligned with an 'FB' extra field. Sizes and CRC go into the
    local header directly (no data descriptor) - torch reads both forms. ZIP64 where a 32-bit field would overflow."""
    b, cd = bytearray(), bytearray()
    for name, data in records:
        nm = f"{archive}/{name}".encode()
        c = zlib.crc32(data) if crc else 0
        big = len(data) >= 0xFFFFFFFF
        z64 = struct.pack("<HHQQ", 1, 16, len(data), len(data)) if big else b""
        lh = len(b)
        pad = (-(lh + 30 + len(nm) + len(z64) + 4)) % 64
        extra = z64 + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        sz = 0xFFFFFFFF if big else len(data)
        b += struct.pack("<IHHHHHIIIHH", 0x04034B50, 45 if big else 0, 0x800, 0, 0, 0, c, sz, sz, len(nm), len(extra)) + nm + extra
        assert len(b) % 64 == 0
        b += data
        bigoff = lh >= 0xFFFFFFFF
        x = (struct.pack("<QQ", len(data), len(data)) if big else b"") + (struct.pack("<Q", lh) if bigoff else b"")
        ce = struct.pack("<HH", 1, len(x)) + x if x else b""
        cd += struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 45 if x else 0, 45 if x else 0, 0x800, 0, 0, 0, c, sz, sz, len(nm), len(ce), 0,
                          0, 0, 0, 0xFFFFFFFF if bigoff else lh) + nm + ce
    o, n = len(b), len(records)
    b += cd
    e = len(b)
    b += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 0x031E, 45, 0, 0, n, n, len(cd), o)      # ZIP64 EOCD
    b += struct.pack("<IIQI", 0x07064B50, 0, e, 1)                                           # ZIP64 locator
    b += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, n, n, min(len(cd), 0xFFFFFFFF), min(o, 0xFFFFFFFF), 0)
    return bytes(b)

def torch_save(pkl, storages=(), archive="archive", crc=True):
    """storages: [(key, bytes)]"""
    return zip_torch([("data.pkl", pkl), ("byteorder", b"little"), *[("data/" + k, d) for k, d in storages], ("version", b"3\n")], archive, crc)

def tensor_pickle(dt, shape, pick=None, key="0"):
    st, n = [], 1
    for x in reversed(shape): st.insert(0, n); n *= x
    v = Red(G("torch._utils", "_rebuild_tensor_v2"),
            (Pid(("storage", G("torch", DTYPES[dt][0]), key, "cpu", n)), 0, tuple(shape), tuple(st), False,
             Red(G("collections", "OrderedDict"), ())))
    return v if pick is None else Pick().done(v)

def write_checkpoint(d, tensors, objects, common, nfiles=1, common_pt=True, common_state=True, crc=True):
    """tensors: {key: (dtype, global_shape, [(offset, size, bytes)])}; objects: {unique_key: value to pickle (list of 1)};
    common: dict. Order: data files, .metadata, common.pt, and metadata.json LAST (its presence marks completeness)."""
    os.makedirs(d, exist_ok=True)
    objects = dict(objects)
    if common_state: objects["common_state/shard_0_1"] = [common]
    files = [open(os.path.join(d, f"__{i}_0.distcp"), "wb") for i in range(nfiles)]
    names = [f"__{i}_0.distcp" for i in range(nfiles)]
    store, sdm, turn = [], {}, 0
    def emit(fqn, off, blob):
        nonlocal turn
        i = turn % nfiles; turn += 1
        pos = files[i].tell(); files[i].write(blob)
        st = {"fqn": fqn, "index": None}
        if off is not None: st["offset"] = Size(off)
        store.append((New(G(DCP, "MetadataIndex"), st),
                      New(G(FSM, "_StorageInfo"), {"relative_path": names[i], "offset": pos, "length": len(blob)})))
    for k, v in objects.items():
        sdm[k] = Red(G(DCP, "BytesStorageMetadata"), ())
        emit(k, None, torch_save(Pick().done(v), crc=crc) if not isinstance(v, bytes) else v)
    for k, (dt, shape, chunks) in tensors.items():
        prop = New(G(DCP, "TensorProperties"),
                   (G("torch", dt), Red(G("torch.serialization", "_get_layout"), ("torch.strided",)), False,
                    Red(G(DCP, "_MEM_FORMAT_ENCODING"), (0,)), False))
        sdm[k] = New(G(DCP, "TensorStorageMetadata"), {"properties": prop, "size": Size(shape), "chunks": [
            New(G(DCP, "ChunkStorageMetadata"), {"offsets": Size(o), "sizes": Size(s)}) for o, s, _ in chunks]})
        for o, s, data in chunks:
            emit(k, o, torch_save(tensor_pickle(dt, s, True), [("0", bytes(data))], crc=crc))
    for f in files: f.flush(); os.fsync(f.fileno()); f.close()
    md = New(G(DCP, "Metadata"), {
        "state_dict_metadata": sdm, "planner_data": None, "storage_data": Pairs(store),
        "storage_meta": New(G(DCP, "StorageMeta"), {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}),
        "version": "1.0.0"})
    with open(os.path.join(d, ".metadata.tmp"), "wb") as f: f.write(Pick().done(md)); f.flush(); os.fsync(f.fileno())
    os.rename(os.path.join(d, ".metadata.tmp"), os.path.join(d, ".metadata"))
    if common_pt:
        open(os.path.join(d, "common.pt"), "wb").write(torch_save(Pick().done(common), archive="common", crc=crc))
    cfg = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    if common_pt: cfg.update(common_backend="torch", common_backend_version=1)
    open(os.path.join(d, "metadata.json"), "w").write(json.dumps(cfg))

# ---------------------------------------------------------------------------------------------------------------
def plain(v):
    """unpickled -> value Pick can write again (Namespace kept)"""
    if isinstance(v, Obj):
        if v.g == "argparse.Namespace": return New(G("argparse", "Namespace"), {k: plain(x) for k, x in v.state.items()})
        raise TypeError(v.g)
    if isinstance(v, dict): return {k: plain(x) for k, x in v.items()}
    if isinstance(v, (list, tuple)): return type(v)(plain(x) for x in v)
    return v

def rechunk(shape, tp):
    """arbitrary different tiling: split the last-but-one (or only) axis into tp parts, leading axes into singletons"""
    nd = len(shape)
    ax = max(nd - 2, 0)
    lead = [[(i, 1) for i in range(shape[j])] for j in range(ax)]
    n = tp if shape[ax] % tp == 0 else 1
    w = shape[ax] // n
    boxes = [((), ())]
    for l in lead: boxes = [(o + (i,), s + (x,)) for o, s in boxes for i, x in l]
    return [(o + (k * w,) + (0,) * (nd - 1 - ax), s + (w,) + tuple(shape[ax + 1:])) for o, s in boxes for k in range(n)]

def resolve(d):
    t = os.path.join(d, "latest_checkpointed_iteration.txt")
    if not os.path.exists(t): return d
    name = open(t).read().strip()
    return os.path.join(d, name if name == "release" else f"iter_{int(name):07d}")

def main():
    p = argparse.ArgumentParser(); p.add_argument("cmd", choices=["dump", "check", "rewrite"]); p.add_argument("ckpt"); p.add_argument("arg", nargs="?")
    p.add_argument("--tp", type=int, default=1); p.add_argument("--files", type=int, default=1); p.add_argument("--no-common-pt", action="store_true")
    p.add_argument("--no-common-state", action="store_true"); p.add_argument("--no-crc", action="store_true")
    p.add_argument("--add-core-attention", action="store_true", help="also write ...core_attention._extra_state, which megatron-core <= 0.14 asks for")
    w = p.parse_args()
    c = Checkpoint(resolve(w.ckpt))
    if w.cmd == "dump":
        print("version", c.version, "extra attrs", c.extra_attrs, "planner_data", type(c.planner_data).__name__)
        for k, (dt, sh, ch) in c.tensors.items():
            print("T", k, dt, sh)
            for o, s in ch: print("     ", o, s, c.store[(k, o)][:3])
        for k in c.objects: print("O", k, c.store[(k, None)][:3], repr(c.object(k))[:120])
        print("C", repr(c.common())[:1500])
    elif w.cmd == "check":
        j = json.load(open(w.arg)); exp = dict(j["megatron"]); opt = j.get("optimizer_model_space", {})
        if any(k in c.tensors for k in opt): exp.update(opt)          # dp_reshardable stores flat buckets instead
        bad = set(exp) ^ {k for k in c.tensors if ".distributed.dp_group_idx_" not in k}
        for k in exp:
            if k in c.tensors:
                dt, sh, b = c.tensor(k)
                if (dt, list(sh), hashlib.sha256(b).hexdigest()) != (exp[k]["dtype"], exp[k]["shape"], exp[k]["sha256"]): bad.add(k)
        print("OK" if not bad else f"MISMATCH {sorted(bad)}", len(exp), "tensors"); sys.exit(bool(bad))
    else:
        ts = {}
        for k in c.tensors:
            dt, sh, b = c.tensor(k); es = DTYPES[dt][1]
            ts[k] = (dt, sh, [(o, s, get(b, sh, o, s, es)) for o, s in rechunk(sh, w.tp)])
        empty = torch_save(Pick().done([Red(G("torch._utils", "_rebuild_tensor_v2"), (
            Pid(("storage", G("torch", "ByteStorage"), "0", "cpu", 0)), 0, (0,), (1,), False, Red(G("collections", "OrderedDict"), ())))]),
            [("0", b"")], crc=not w.no_crc)
        objs = {k: empty for k in c.objects if k != "common_state/shard_0_1" and not k.startswith("rng_state")}
        if w.add_core_attention:
            objs.update({k.replace("linear_proj._extra", "core_attention._extra"): empty for k in list(objs) if "linear_proj._extra" in k})
        write_checkpoint(w.arg, ts, objs, plain(c.common()), w.files, not w.no_common_pt, not w.no_common_state, not w.no_crc)
        print("wrote", w.arg)

if __name__ == "__main__":
    main()
