//! The connection and the credentials of its requests. They are loaded again when one of their files has changed: tokens and
//! certificates rotate. Files that cannot be read change nothing: the last good credentials stay in use, as in client-go.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::config::{ClientConfig, ClientConfigError};
use super::files::{self, Files};
use nodedock_base::error::chain;

/// Interval of reading tokens and certificates again (client-go does so every minute), and the minimum interval after a refusal.
pub(crate) const API_CREDENTIALS_PERIOD: Duration = Duration::from_secs(60);
pub(crate) const API_CREDENTIALS_REST: Duration = Duration::from_secs(2);

pub(super) struct Credentials {
    pub(super) config: ClientConfig,
    current: ArcSwap<kube::Client>,
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
        let (client, files) = config.load().await?;
        Ok(Self::new(config, client, files))
    }

    /// Credentials without files are never loaded again.
    pub(super) fn new(config: ClientConfig, client: kube::Client, files: Files) -> Self {
        let checked = Mutex::new(Checked {
            at: Instant::now(),
            files,
            failing: false,
        });
        Self {
            config,
            current: ArcSwap::from_pointee(client),
            checked,
        }
    }

    /// The client to use; its files are checked every minute.
    pub(super) async fn current(&self) -> Arc<kube::Client> {
        // A request that comes during a check uses what there is.
        if let Ok(mut checked) = self.checked.try_lock()
            && checked.at.elapsed() >= API_CREDENTIALS_PERIOD
        {
            self.check(&mut checked).await;
        }
        self.current.load_full()
    }

    /// Returns the client with credentials other than `used`, which were refused, if there is one.
    pub(super) async fn replaced(&self, used: &Arc<kube::Client>) -> Option<Arc<kube::Client>> {
        let mut checked = self.checked.lock().await;
        if Arc::ptr_eq(&self.current.load_full(), used)
            && checked.at.elapsed() >= API_CREDENTIALS_REST
        {
            self.check(&mut checked).await;
        }
        let current = self.current.load_full();
        (!Arc::ptr_eq(&current, used)).then_some(current)
    }

    async fn check(&self, checked: &mut Checked) {
        checked.at = Instant::now();
        let paths = checked.files.iter().map(|(path, _)| path.clone()).collect();
        let files = files::read(paths).await;
        if files == checked.files && !checked.failing {
            return;
        }
        match self.config.load().await {
            Ok((client, files)) => {
                self.current.store(Arc::new(client));
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
