//! The channel on which changes are told to whoever watches. Nobody need listen, and a slow listener loses the oldest.

use tokio::sync::broadcast;

use crate::clock::now_ms;
use nodedock_model::{Changed, ChangedKind};

/// How far a listener may fall behind before it is told that it lost some.
const CHANGES_BEHIND_MAX: usize = 1024;

#[derive(Clone)]
pub struct Changes(broadcast::Sender<Changed>);

impl Default for Changes {
    fn default() -> Self {
        Self(broadcast::channel(CHANGES_BEHIND_MAX).0)
    }
}

impl Changes {
    pub fn tell(&self, kind: ChangedKind, name: impl ToString, state: &str) {
        if self.0.receiver_count() == 0 {
            return;
        }
        let changed = Changed { kind, name: name.to_string(), state: state.to_owned(), at_ms: now_ms() };
        // Nobody listening is no error.
        let _ = self.0.send(changed);
    }

    pub fn listen(&self) -> broadcast::Receiver<Changed> {
        self.0.subscribe()
    }
}
