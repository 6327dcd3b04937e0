//! User of the machine that has the other end of a TCP connection over loopback.
//!
//! The kernel answers for one connection by its addresses (sock_diag(7)); nothing is listed.

use std::io;
use std::net::{IpAddr, SocketAddr};

use netlink_sys::{Socket, SocketAddr as NetlinkAddr, constants::NETLINK_SOCK_DIAG};
use tokio::net::TcpStream;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
/// linux/sock_diag.h, linux/netlink.h
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const TCP_ESTABLISHED: u8 = 1;
const HEADER_BYTES: usize = 16;
const REQUEST_BYTES: usize = HEADER_BYTES + 56;
/// Offsets in a response: of the state, and of the user, which follows state, addresses and three numbers (`struct inet_diag_msg`).
const STATE_AT: usize = HEADER_BYTES + 1;
const USER_AT: usize = HEADER_BYTES + 4 + 48 + 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    User(u32),
    /// It has closed its end already, so it has no user.
    Closed,
}

/// Asks the kernel for the user of the other end.
///
/// # Errors
///
/// If the kernel does not say, as one without the module `tcp_diag`.
pub(crate) fn peer(stream: &TcpStream) -> io::Result<Peer> {
    let (client, server) = (stream.peer_addr()?, stream.local_addr()?);
    let socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.connect(&NetlinkAddr::new(0, 0))?;
    socket.send(&request(client, server), 0)?;
    // The kernel has answered by now.
    socket.set_non_blocking(true)?;
    let mut answer = Vec::with_capacity(512);
    socket.recv(&mut answer, 0)?;
    read(&answer)
}

fn request(client: SocketAddr, server: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    bytes.extend((REQUEST_BYTES as u32).to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([
        if client.is_ipv4() { AF_INET } else { AF_INET6 },
        IPPROTO_TCP,
        0,
        0,
    ]);
    // In any state, on any interface, without a cookie.
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(client.port().to_be_bytes());
    bytes.extend(server.port().to_be_bytes());
    for address in [client.ip(), server.ip()] {
        match address {
            IpAddr::V4(address) => bytes.extend([address.octets().as_slice(), &[0; 12]].concat()),
            IpAddr::V6(address) => bytes.extend(address.octets()),
        }
    }
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend([0xff; 8]);
    bytes
}

fn read(answer: &[u8]) -> io::Result<Peer> {
    let kind = answer
        .get(4..6)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u16::from_ne_bytes);
    if kind == Some(NLMSG_ERROR) {
        let code = number(answer, HEADER_BYTES)?.cast_signed();
        // No such connection here: the client's end is gone, or has other addresses, as behind a redirection.
        return Err(io::Error::from_raw_os_error(-code));
    }
    match answer.get(STATE_AT) {
        // The kernel keeps a closed end without its user.
        Some(&state) if state != TCP_ESTABLISHED => Ok(Peer::Closed),
        Some(_) => number(answer, USER_AT).map(Peer::User),
        None => Err(too_short()),
    }
}

fn number(answer: &[u8], at: usize) -> io::Result<u32> {
    let bytes = answer
        .get(at..at + 4)
        .and_then(|bytes| bytes.try_into().ok());
    bytes.map(u32::from_ne_bytes).ok_or_else(too_short)
}

fn too_short() -> io::Error {
    io::Error::other("the kernel's answer about a connection is too short")
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn connection_has_user_until_closed() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = match TcpListener::bind(address).await {
                Ok(listener) => listener,
                Err(error) => {
                    eprintln!("skipped: no {address} here: {error}");
                    continue;
                }
            };
            let client = TcpStream::connect(listener.local_addr().unwrap())
                .await
                .unwrap();
            let (served, _) = listener.accept().await.unwrap();
            let user = match peer(&served) {
                Ok(user) => user,
                Err(error) => {
                    eprintln!("skipped: this kernel does not say who connects: {error}");
                    return;
                }
            };
            let own = std::fs::metadata("/proc/self")
                .map(|own| std::os::unix::fs::MetadataExt::uid(&own));
            assert_eq!(user, Peer::User(own.unwrap()));
            drop(client);
            assert_eq!(peer(&served).unwrap(), Peer::Closed);
        }
    }

    #[test]
    fn answers_of_another_form_are_errors() {
        for short in [&[][..], &[0; 16], &[0; 17]] {
            assert!(
                read(short).is_err() || read(short).unwrap() == Peer::Closed,
                "{short:?}"
            );
        }
        let mut established = vec![0; USER_AT];
        established[STATE_AT] = TCP_ESTABLISHED;
        assert!(read(&established).is_err());
        established.extend(1000_u32.to_ne_bytes());
        assert_eq!(read(&established).unwrap(), Peer::User(1000));
        let mut refused = vec![0; HEADER_BYTES];
        refused[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        assert!(read(&refused).is_err(), "without its code");
        refused.extend((-1_i32).to_ne_bytes());
        assert_eq!(
            read(&refused).unwrap_err().kind(),
            io::ErrorKind::PermissionDenied
        );
    }
}
