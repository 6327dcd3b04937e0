//! The side of the instance that serves: hears who asks for its place, lets older ones wait, and gives way to a newer one.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::net::{UnixListener, UnixStream};

use super::order::{Judgement, Order};
use super::place::Place;
use super::words::{Talk, Word};
use nodedock_base::error::chain;
use nodedock_base::socket;
use nodedock_model::{Uid, limit};

pub(super) struct Holder {
    instance: Uid,
    order: Order,
    listener: UnixListener,
    /// Who learns by the end of its connection that the place may be free.
    standing_by: VecDeque<Talk>,
}

/// The newer instance to which the place is given.
pub(super) struct Successor {
    pub(super) instance: Uid,
    talk: Talk,
}

impl Holder {
    /// Whoever has the lease.
    pub(super) async fn open(place: &Place) -> Result<Self> {
        let listener = socket::bind(&place.door).await.context("listen for the next instance")?;
        let (instance, order) = (place.instance.clone(), place.note());
        Ok(Self { instance, order, listener, standing_by: VecDeque::new() })
    }

    /// Waits until a newer instance asks.
    pub(super) async fn asked(&mut self) -> Successor {
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(error = chain(&error), "the next instance cannot be heard, trying again");
                    tokio::time::sleep(limit::ADMIN_ACCEPT_PAUSE).await;
                    continue;
                }
            };
            match self.judge(stream).await {
                Ok(Some(successor)) => return successor,
                Ok(None) => {}
                Err(error) => tracing::debug!(error = chain(&error), "nobody asked for this place"),
            }
        }
    }

    async fn judge(&mut self, stream: UnixStream) -> io::Result<Option<Successor>> {
        let own = rustix::process::geteuid().as_raw();
        if stream.peer_cred()?.uid() != own {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut talk = Talk::new(stream);
        let Some(Word::Ask { instance }) = talk.hear(limit::HANDOVER_WORD).await? else { return Ok(None) };
        match self.order.judge(&self.instance, &instance) {
            Judgement::HandOver => Ok(Some(Successor { instance, talk })),
            Judgement::StandBy => {
                tracing::info!(%instance, "an older instance stands by");
                talk.say(&Word::StandBy { instance: self.instance.clone() }).await?;
                if self.standing_by.len() >= limit::HANDOVER_STANDBY_MAX {
                    self.standing_by.pop_front();
                }
                self.standing_by.push_back(talk);
                Ok(None)
            }
            Judgement::Twice => {
                let why = format!("another process serves as instance {instance}");
                talk.say(&Word::Refused { why }).await.map(|()| None)
            }
        }
    }
}

impl Successor {
    /// Says that the place is free. False: it is gone.
    pub(super) async fn release(&mut self, by: &Uid) -> bool {
        self.talk.say(&Word::Released { instance: by.clone() }).await.is_ok()
    }

    /// Waits until it says that the kubelet knows it. False: it is gone, or says nothing.
    pub(super) async fn serves(&mut self, within: Duration) -> bool {
        matches!(self.talk.hear(within).await, Ok(Some(Word::Serving)))
    }

    pub(super) async fn gone(&mut self) {
        self.talk.gone().await;
    }
}
