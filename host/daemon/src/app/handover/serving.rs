//! The side of the instance that serves: it receives the requests of others, lets older instances wait, and returns a newer one.

use std::collections::VecDeque;
use std::io;

use anyhow::{Context, Result};
use tokio::net::{UnixListener, UnixStream};

use super::message::{Connection, Message, Peer};
use super::order::{Decision, Order};
use super::shared_root::SharedRoot;
use crate::admin::http::ADMIN_ACCEPT_PAUSE;
use crate::app::handover::HANDOVER_MESSAGE;
use nodedock_base::error::chain;
use nodedock_base::socket;
use nodedock_model::Uid;

/// Maximum number of instances on standby at the same time; of more, the oldest connect again.
const HANDOVER_STANDBY_MAX: usize = 16;

pub(super) struct HandoverListener {
    instance: Uid,
    order: Order,
    listener: UnixListener,
    /// Older instances: the end of its connection shows each of them that the lock may be free.
    standing_by: VecDeque<Connection>,
}

impl HandoverListener {
    /// The caller owns the lease.
    pub(super) async fn open(root: &SharedRoot) -> Result<Self> {
        let listener = socket::bind(&root.paths.handover)
            .await
            .context("listen for the next instance")?;
        let (instance, order) = (root.instance.clone(), root.record());
        Ok(Self {
            instance,
            order,
            listener,
            standing_by: VecDeque::new(),
        })
    }

    /// Waits for the request of a newer instance.
    pub(super) async fn newer_instance(&mut self) -> Peer {
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(
                        error = chain(&error),
                        "the next instance cannot be heard, trying again"
                    );
                    tokio::time::sleep(ADMIN_ACCEPT_PAUSE).await;
                    continue;
                }
            };
            match self.decide(stream).await {
                Ok(Some(successor)) => return successor,
                Ok(None) => {}
                Err(error) => tracing::debug!(
                    error = chain(&error),
                    "a connection brought no valid request"
                ),
            }
        }
    }

    async fn decide(&mut self, stream: UnixStream) -> io::Result<Option<Peer>> {
        if stream.peer_cred()?.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut connection = Connection::new(stream);
        let request = connection.receive(HANDOVER_MESSAGE).await?;
        let Some(Message::Ask { instance }) = request else {
            return Ok(None);
        };
        match self.order.decide(&self.instance, &instance) {
            Decision::HandOver => {
                return Ok(Some(Peer {
                    instance,
                    connection,
                }));
            }
            Decision::StandBy => {
                tracing::info!(%instance, "an older instance is on standby");
                connection
                    .send(&Message::StandBy {
                        instance: self.instance.clone(),
                    })
                    .await?;
                if self.standing_by.len() >= HANDOVER_STANDBY_MAX {
                    self.standing_by.pop_front();
                }
                self.standing_by.push_back(connection);
            }
            Decision::Duplicate => {
                let why = format!("another process serves as instance {instance}");
                connection.send(&Message::Refused { why }).await?;
            }
        }
        Ok(None)
    }
}
