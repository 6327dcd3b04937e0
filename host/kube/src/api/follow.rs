//! Follows a set of objects: a list, then a watch from there, and again, with delays that keep a server that is unwell from us.
//!
//! `pace` decides what comes next and when; the task carries it out. What was missed in between is found by the next list: a follower
//! compares it with what it knew.

mod pace;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::watch as channel;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::error::ApiError;
use super::retry::chance;
use super::version::Version;
use super::watch::WatchEvent;
use super::{Api, Selection};
use nodedock_base::backoff::spread;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use pace::{End, Next, Pace};

/// Whom a set of objects is told to, in their order, one call at a time.
#[async_trait]
pub trait Follower: Send + Sync {
    /// These are there now, and no others. Items of a list say neither kind nor version.
    async fn listed(&self, objects: Vec<Value>);
    /// It is new, or has changed.
    async fn applied(&self, object: Value);
    /// It is gone; this is how it was last.
    async fn deleted(&self, object: Value);
}

/// What is followed.
#[derive(Clone)]
pub struct Target {
    /// For the log: `resource slices of this node`.
    pub what: &'static str,
    pub path: Path,
    pub selection: Selection,
    /// Lists anew after so long, though nothing seems to be missed.
    pub resync: Option<Duration>,
}

/// Where objects are.
#[derive(Clone)]
pub enum Path {
    Fixed(String),
    /// By the version of `resource.k8s.io` that is served.
    Versioned(Arc<dyn Fn(Version) -> String + Send + Sync>),
}

impl Path {
    pub fn versioned(path: impl Fn(Version) -> String + Send + Sync + 'static) -> Self {
        Self::Versioned(Arc::new(path))
    }
}

/// How far what the follower knows can be trusted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Standing {
    /// Nothing was listed yet.
    #[default]
    Unlisted,
    /// Listed, and a watch is open.
    Live,
    /// Listed once; there is no watch now.
    Behind,
}

/// Keeps a set followed until it is dropped.
pub struct Following {
    standing: channel::Receiver<Standing>,
    again: Arc<tokio::sync::Notify>,
    _end: DropGuard,
}

impl Following {
    pub fn standing(&self) -> channel::Receiver<Standing> {
        self.standing.clone()
    }

    pub fn is_live(&self) -> bool {
        *self.standing.borrow() == Standing::Live
    }

    /// Resolves when there was a list; false if there will be none.
    pub async fn synced(&self) -> bool {
        self.standing.clone().wait_for(|standing| *standing != Standing::Unlisted).await.is_ok()
    }

    /// Asks for a new list.
    pub fn list_again(&self) {
        self.again.notify_one();
    }
}

pub(super) fn start(api: Api, tasks: &Tasks, target: Target, follower: Arc<dyn Follower>) -> Following {
    let (told, standing) = channel::channel(Standing::Unlisted);
    let (end, again) = (CancellationToken::new(), Arc::new(tokio::sync::Notify::new()));
    let (stopped, ended) = (tasks.stopped(), end.clone());
    let task = Task { api, target, follower, told, again: again.clone(), troubled: false };
    tasks.spawn("api-follow", async move {
        tokio::select! {
            // What was not told is found by the next list, of whoever follows then.
            () = stopped => {}
            () = ended.cancelled() => {}
            () = task.run() => {}
        }
    });
    Following { standing, again, _end: end.drop_guard() }
}

struct Task {
    api: Api,
    target: Target,
    follower: Arc<dyn Follower>,
    told: channel::Sender<Standing>,
    again: Arc<tokio::sync::Notify>,
    /// A failure was said, and its end was not.
    troubled: bool,
}

impl Task {
    async fn run(mut self) {
        let mut pace = Pace::default();
        let mut from: Option<String> = None;
        let mut listed_at = Instant::now();
        loop {
            let end = match from.take() {
                None => match self.list().await {
                    Ok(version) => {
                        listed_at = Instant::now();
                        from = Some(version);
                        continue;
                    }
                    Err(error) => End::failed(&error),
                },
                Some(version) => {
                    let opened = Instant::now();
                    let resync_at = self.target.resync.map(|period| listed_at + period);
                    let (version, end) = self.watch(version, resync_at).await;
                    from = Some(version);
                    self.told.send_replace(Standing::Behind);
                    self.api.inner.counts.watch_restarts.fetch_add(1, Relaxed);
                    end.after(opened.elapsed())
                }
            };
            let (next, delay) = pace.after(&end);
            if next == Next::List {
                from = None;
            }
            tokio::time::sleep(spread(delay, chance())).await;
        }
    }

    async fn path(&self) -> Result<(String, Option<Version>), ApiError> {
        match &self.target.path {
            Path::Fixed(path) => Ok((path.clone(), None)),
            Path::Versioned(path) => self.api.version().await.map(|version| (path(version), Some(version))),
        }
    }

    /// The resource version from which to watch.
    async fn list(&mut self) -> Result<String, ApiError> {
        let listed = match self.path().await {
            Ok((path, version)) => {
                let listed = self.api.list(&path, &self.target.selection).await;
                if let (Err(ApiError::NotServed(_)), Some(version)) = (&listed, version) {
                    self.api.forget(version).await;
                }
                listed
            }
            Err(error) => Err(error),
        };
        self.say(listed.as_ref().err());
        let listed = listed?;
        self.follower.listed(listed.items).await;
        if *self.told.borrow() == Standing::Unlisted {
            self.told.send_replace(Standing::Behind);
        }
        Ok(listed.resource_version)
    }

    /// Where it came to, and how it ended.
    async fn watch(&mut self, mut version: String, resync_at: Option<Instant>) -> (String, End) {
        let opened = match self.path().await {
            Ok((path, _)) => self.api.watch(&path, &self.target.selection, &version).await,
            Err(error) => Err(error),
        };
        let mut watch = match opened {
            Ok(watch) => watch,
            Err(error) => {
                self.say(Some(&error));
                return (version, End::failed(&error));
            }
        };
        self.say(None);
        self.told.send_replace(Standing::Live);
        let resync = async {
            match resync_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(resync);
        loop {
            let event = tokio::select! {
                // `next` keeps what it has read, and a list follows anyway.
                () = &mut resync => return (version, End::Resync),
                () = self.again.notified() => return (version, End::Resync),
                event = watch.next() => event,
            };
            match event {
                Ok(Some(event)) => {
                    if let Some(reached) = event.resource_version() {
                        version = reached.to_owned();
                    }
                    match event {
                        WatchEvent::Applied(object) => self.follower.applied(object).await,
                        WatchEvent::Deleted(object) => self.follower.deleted(object).await,
                        WatchEvent::Bookmark(_) => {}
                    }
                }
                Ok(None) => return (version, End::Closed),
                Err(error) => {
                    // A server that ends a watch is no trouble: the next one tells whether there is any.
                    tracing::debug!(what = self.target.what, error = chain(&error), "a watch ended");
                    return (version, End::failed(&error));
                }
            }
        }
    }

    /// The first failure, and its end. That nobody is there is a condition of the node, and not said here.
    fn say(&mut self, failure: Option<&ApiError>) {
        match failure {
            Some(ApiError::Expired(_)) => {}
            Some(error) if error.is_away() || matches!(error, ApiError::TooManyRequests { .. }) => {
                tracing::debug!(what = self.target.what, error = chain(error), "cannot be followed now");
            }
            Some(error) if !std::mem::replace(&mut self.troubled, true) => {
                tracing::warn!(
                    what = self.target.what,
                    error = chain(error),
                    "cannot be followed, trying again"
                );
            }
            Some(_) => {}
            None if std::mem::take(&mut self.troubled) => {
                tracing::info!(what = self.target.what, "followed again");
            }
            None => {}
        }
    }
}
