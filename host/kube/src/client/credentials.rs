//! The connection and the credentials of its requests. They are loaded again when one of their files has changed: tokens and
//! certificates rotate. Files are read by a task of their own every minute, and on the way of a request only after the server refused its
//! credentials. Another token needs no other connection. Files that cannot be read change nothing: the last good credentials stay in use,
//! as in client-go.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use super::config::{ClientConfig, ClientConfigError, Loaded};
use super::connection::Connection;
use super::files::{self, Files};
use nodedock_base::error::chain;

/// Interval of reading tokens and certificates again (client-go does so every minute), and the minimum interval after a refusal.
pub(crate) const API_CREDENTIALS_PERIOD: Duration = Duration::from_secs(60);
pub(crate) const API_CREDENTIALS_REST: Duration = Duration::from_secs(2);

pub(super) struct Credentials {
    pub(super) config: ClientConfig,
    current: ArcSwap<Connection>,
    checked: Mutex<Checked>,
}

/// The last check of the files.
struct Checked {
    at: Instant,
    files: Files,
    failing: bool,
}

impl Credentials {
    pub(super) async fn load(config: ClientConfig) -> Result<Self, ClientConfigError> {
        let Loaded { connection, files } = config.load(None).await?;
        Ok(Self::new(config, connection, files))
    }

    /// Credentials without files are never loaded again.
    pub(super) fn new(config: ClientConfig, connection: Connection, files: Files) -> Self {
        let checked = Mutex::new(Checked {
            at: Instant::now(),
            files,
            failing: false,
        });
        Self {
            config,
            current: ArcSwap::from_pointee(connection),
            checked,
        }
    }

    /// The connection to use.
    pub(super) fn current(&self) -> Arc<Connection> {
        self.current.load_full()
    }

    /// Returns the connection with credentials other than `used`, which were refused, if there is one.
    pub(super) async fn replaced(&self, used: &Arc<Connection>) -> Option<Arc<Connection>> {
        let mut checked = self.checked.lock().await;
        if Arc::ptr_eq(&self.current.load_full(), used)
            && checked.at.elapsed() >= API_CREDENTIALS_REST
        {
            self.check(&mut checked).await;
        }
        let current = self.current.load_full();
        (!Arc::ptr_eq(&current, used)).then_some(current)
    }

    /// Reads the files once a minute; never returns.
    pub(super) async fn keep(&self) {
        loop {
            sleep(API_CREDENTIALS_PERIOD).await;
            self.refresh().await;
        }
    }

    /// Reads the files, and takes what is new.
    pub(super) async fn refresh(&self) {
        let mut checked = self.checked.lock().await;
        self.check(&mut checked).await;
    }

    async fn check(&self, checked: &mut Checked) {
        checked.at = Instant::now();
        let files = files::read(checked.files.paths()).await;
        if files == checked.files && !checked.failing {
            return;
        }
        let before = self.current.load_full();
        match self.config.load(Some((&before, &checked.files))).await {
            Ok(Loaded { connection, files }) => {
                self.current.store(Arc::new(connection));
                (checked.files, checked.failing) = (files, false);
                tracing::info!("credentials for the API server are loaded again");
            }
            Err(error) if !std::mem::replace(&mut checked.failing, true) => {
                tracing::warn!(
                    error = chain(&error),
                    "credentials cannot be loaded, the last ones stay in use"
                );
            }
            Err(_) => {}
        }
    }
}
