//! The channel that publishes changes. It needs no listener, and a slow listener loses the oldest changes.

use tokio::sync::broadcast;

use crate::clock::now_ms;
use nodedock_model::{Changed, ChangedKind};

/// Number of changes that a listener may lag before it is notified of a loss.
const CHANGES_BEHIND_MAX: usize = 1024;

#[derive(Clone)]
pub struct Changes(broadcast::Sender<Changed>);

impl Default for Changes {
    fn default() -> Self {
        Self(broadcast::channel(CHANGES_BEHIND_MAX).0)
    }
}

impl Changes {
    pub fn report(&self, kind: ChangedKind, name: impl ToString, state: &str) {
        if self.0.receiver_count() == 0 {
            return;
        }
        let changed = Changed {
            kind,
            name: name.to_string(),
            state: state.to_owned(),
            at_ms: now_ms(),
        };
        // A channel without listeners is no error.
        let _ = self.0.send(changed);
    }

    pub fn listen(&self) -> broadcast::Receiver<Changed> {
        self.0.subscribe()
    }

    /// Resolves with the next change of a kind, or when some changes were missed; never once all senders are gone.
    pub async fn next_of(changes: &mut broadcast::Receiver<Changed>, kind: ChangedKind) {
        loop {
            match changes.recv().await {
                Ok(changed) if changed.kind != kind => {}
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => return,
                Err(broadcast::error::RecvError::Closed) => return std::future::pending().await,
            }
        }
    }
}
