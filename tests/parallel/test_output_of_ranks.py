"""What ranks print, in the streams of the process that has started them."""

from multiprocessing import Pipe

from rlnumba.parallel.launch import _copy_output


def test_lines_go_to_the_stream_of_the_same_name(capsys):
    """Each with its rank, whole, in the order of its stream; the last one may have no end."""
    pipes = {}
    for rank, stream, text in ((1, "stdout", b"one\ntwo\n"), (2, "stderr", b"three\n\xfffour"), (0, "stderr", b"")):
        reader, writer = Pipe(duplex=False)
        pipes[reader] = rank, stream
        with open(writer.fileno(), "wb", closefd=False) as file:
            file.write(text)
        writer.close()
    _copy_output(pipes)
    printed = capsys.readouterr()
    assert printed.out == "[1] one\n[1] two\n" and printed.err == "[2] three\n[2] \ufffdfour\n"
