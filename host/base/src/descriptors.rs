//! Lines of text with file descriptors on a Unix socket.
//!
//! A descriptor arrives with the first byte of the line that it was sent with, so all of a line are there when its end is.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// File descriptors with one line. The kernel takes 253.
pub const DESCRIPTORS_MAX: usize = 64;
/// Bytes of a line.
pub const LINE_BYTES_MAX: usize = 16 << 10;

/// Sends bytes with descriptors, and returns how many bytes were sent; the descriptors go with the first of them.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fits = descriptors.len() <= DESCRIPTORS_MAX;
    if !fits
        || !(descriptors.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(descriptors)))
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "more descriptors than go with one line",
        ));
    }
    Ok(rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?)
}

/// Bytes and descriptors that have been received and not consumed.
#[derive(Debug, Default)]
pub struct Received {
    bytes: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
}

impl Received {
    /// Reads what is there, and returns how many bytes that was; 0: the other side is gone.
    pub fn read(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        if self.bytes.len() >= LINE_BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a line has no end",
            ));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut buffer = [0; 4096];
        let mut into = [IoSliceMut::new(&mut buffer)];
        let read =
            rustix::net::recvmsg(socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        if self.descriptors.len() > 2 * DESCRIPTORS_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "more descriptors than lines name",
            ));
        }
        self.bytes.extend_from_slice(&buffer[..read.bytes]);
        Ok(read.bytes)
    }

    /// The next line that is whole, without its end.
    pub fn line(&mut self) -> io::Result<Option<String>> {
        let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') else {
            return Ok(None);
        };
        let mut line: Vec<_> = self.bytes.drain(..=end).collect();
        line.pop();
        String::from_utf8(line)
            .map(Some)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// The next descriptors, as many as the line names.
    pub fn descriptors(&mut self, count: usize) -> io::Result<Vec<OwnedFd>> {
        if self.descriptors.len() < count {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "descriptors are missing",
            ));
        }
        Ok(self.descriptors.drain(..count).collect())
    }
}

/// Sends a line with descriptors.
pub async fn send_line(
    socket: &UnixStream,
    line: &str,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = format!("{line}\n").into_bytes();
    let (mut sent, mut descriptors) = (0, descriptors);
    while sent < bytes.len() {
        sent += socket
            .async_io(Interest::WRITABLE, || {
                send(socket.as_fd(), &bytes[sent..], descriptors)
            })
            .await?;
        descriptors = &[];
    }
    Ok(())
}

/// Waits for a whole line. `None`: the other side is gone.
pub async fn receive_line(
    socket: &UnixStream,
    received: &mut Received,
) -> io::Result<Option<String>> {
    loop {
        if let Some(line) = received.line()? {
            return Ok(Some(line));
        }
        if socket
            .async_io(Interest::READABLE, || received.read(socket.as_fd()))
            .await?
            == 0
        {
            return if received.bytes.is_empty() {
                Ok(None)
            } else {
                Err(io::ErrorKind::UnexpectedEof.into())
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream as StdStream;

    use super::*;

    #[tokio::test]
    async fn lines_arrive_with_their_descriptors() {
        let (near, far) = UnixStream::pair().unwrap();
        let pairs: Vec<_> = (0..DESCRIPTORS_MAX)
            .map(|_| StdStream::pair().unwrap())
            .collect();
        let descriptors: Vec<_> = pairs.iter().map(|(end, _)| end.as_fd()).collect();
        send_line(&near, "nothing", &[]).await.unwrap();
        send_line(&near, "some", &descriptors[..1]).await.unwrap();
        send_line(&near, "many", &descriptors).await.unwrap();
        drop(near);
        let mut received = Received::default();
        for (expected, count) in [("nothing", 0), ("some", 1), ("many", DESCRIPTORS_MAX)] {
            assert_eq!(
                receive_line(&far, &mut received).await.unwrap().unwrap(),
                expected
            );
            let arrived = received.descriptors(count).unwrap();
            if let Some(last) = arrived.into_iter().last() {
                StdStream::from(last).write_all(b"x").unwrap();
                let mut byte = [0];
                (&pairs[count - 1].1).read_exact(&mut byte).unwrap();
                assert_eq!(&byte, b"x");
            }
        }
        assert_eq!(receive_line(&far, &mut received).await.unwrap(), None);
        received.descriptors(1).unwrap_err();
    }

    #[tokio::test]
    async fn endless_line_or_many_descriptors_fail() {
        let (near, far) = UnixStream::pair().unwrap();
        let endless = "x".repeat(LINE_BYTES_MAX + 4096);
        let (sent, received) = tokio::join!(
            async {
                let sent = send_line(&near, &endless, &[]);
                tokio::time::timeout(std::time::Duration::from_secs(5), sent).await
            },
            async {
                let error = receive_line(&far, &mut Received::default())
                    .await
                    .unwrap_err();
                drop(far);
                error
            }
        );
        assert_eq!(received.kind(), io::ErrorKind::InvalidData);
        // What did not fit into the socket's buffer had no reader.
        let _ = sent;
        let (near, _far) = UnixStream::pair().unwrap();
        let descriptors = vec![near.as_fd(); DESCRIPTORS_MAX + 1];
        send_line(&near, "many", &descriptors).await.unwrap_err();
    }
}
