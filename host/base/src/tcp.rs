//! A TCP address of the config. While the daemon cannot listen on it, as when another program does, the node has a condition, and the rest
//! of the daemon serves.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpListener;

use crate::backoff::Backoff;
use crate::conditions::Conditions;
use nodedock_model::{Problem, ProblemCode};

/// Delay until the next attempt: an attempt costs a few system calls.
const RETRY_MIN: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(15);

/// An address after the first attempt to listen on it.
#[derive(Debug)]
pub struct ListenAddress {
    address: SocketAddr,
    /// Key of the config.
    key: &'static str,
    bound: io::Result<TcpListener>,
}

impl ListenAddress {
    pub async fn bind(address: SocketAddr, key: &'static str) -> Self {
        Self {
            address,
            key,
            bound: TcpListener::bind(address).await,
        }
    }

    /// The address that clients know: with the port that the system chose, if it did.
    pub fn address(&self) -> SocketAddr {
        let bound = self
            .bound
            .as_ref()
            .ok()
            .and_then(|listener| listener.local_addr().ok());
        bound.unwrap_or(self.address)
    }

    /// Returns the listener, when it is there. Safe to drop.
    pub async fn listener(self, conditions: &Conditions) -> TcpListener {
        let Self {
            address,
            key,
            mut bound,
        } = self;
        let mut backoff = Backoff::new(RETRY_MIN, RETRY_MAX);
        loop {
            match bound {
                Ok(listener) => {
                    conditions.clear(ProblemCode::ListenFailed, key);
                    return listener;
                }
                Err(error) => {
                    let message = format!(
                        "cannot listen on {address} ({key} of the config), trying again: {error}"
                    );
                    conditions.set(
                        key,
                        Problem::unavailable(ProblemCode::ListenFailed, message),
                    );
                }
            }
            tokio::time::sleep(backoff.delay()).await;
            bound = TcpListener::bind(address).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::changes::Changes;

    #[tokio::test(start_paused = true)]
    async fn occupied_address_is_reported_and_retried() {
        let occupied = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = occupied.local_addr().unwrap();
        let changes = Changes::default();
        let (mut heard, conditions) = (changes.listen(), Conditions::new(changes));
        let listen = ListenAddress::bind(address, "admin.listen").await;
        assert_eq!(listen.address(), address);
        let of_task = conditions.clone();
        let listener = tokio::spawn(async move { listen.listener(&of_task).await });
        heard.recv().await.unwrap();
        let [condition] = conditions.list().try_into().unwrap();
        assert_eq!(
            (condition.problem.code.as_str(), condition.subject.as_str()),
            ("listen-failed", "admin.listen")
        );
        assert!(
            condition.problem.message.contains(&address.to_string()),
            "{condition:?}"
        );
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!(!listener.is_finished());
        drop(occupied);
        assert_eq!(listener.await.unwrap().local_addr().unwrap(), address);
        assert_eq!(conditions.list(), []);
    }
}
