//! Whether the daemon lives, and whether it is ready.
//!
//! It lives when its managers take a request, the tasks that carry out what discovery finds take one, the checkpoint's writer does,
//! and on a Kubernetes node the path of each driver that is offered to the kubelet. No driver is asked. However many ask at once, and however often, there is one look at a time and one in a second.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout};

use super::{Admin, paths};
use nodedock_base::changes::Changes;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::registry::{DriverState, DriverView, Registry};
use nodedock_model::{DriverKind, limit};
use nodedock_native::sockets;
use nodedock_wasm::file_watch;

/// What is wrong, a line each.
type Wrong = Vec<String>;
type Look = Shared<BoxFuture<'static, Wrong>>;

/// The look under way, or the last one.
pub(super) struct Live {
    begin: Box<dyn Fn() -> BoxFuture<'static, Wrong> + Send + Sync>,
    last: Mutex<Option<(Instant, Look)>>,
}

/// Looks whether a node's parts answer.
pub(super) fn live(admin: Admin) -> Live {
    let held = Held::default();
    Live::new(move || look_at(admin.clone(), held.clone()).boxed())
}

impl Live {
    fn new(begin: impl Fn() -> BoxFuture<'static, Wrong> + Send + Sync + 'static) -> Self {
        Self { begin: Box::new(begin), last: Mutex::default() }
    }

    /// What is wrong. Whoever asks while a look is under way, or shortly after it, shares it.
    pub(super) fn look(&self) -> Look {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((begun, look)) = &*last
            && (look.peek().is_none() || begun.elapsed() < limit::LIVE_LOOK_PERIOD)
        {
            return look.clone();
        }
        let look = (self.begin)().shared();
        *last = Some((Instant::now(), look.clone()));
        look
    }
}

/// Looks at what is behind locks: on a thread that nobody else needs, because a lock that is never given back keeps it, and on one at
/// a time.
#[derive(Clone)]
struct Held(Arc<Semaphore>);

impl Default for Held {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl Held {
    /// Returns when `look` has come to its end. False: it panicked.
    async fn answers(self, look: impl FnOnce() + Send + 'static) -> bool {
        let Ok(place) = self.0.acquire_owned().await else { return false };
        let look = move || {
            look();
            drop(place);
        };
        tokio::task::spawn_blocking(look).await.is_ok()
    }
}

async fn look_at(admin: Admin, held: Held) -> Wrong {
    let manager = admin.manager.clone();
    // The pods' count takes the lock of their claims too.
    let pods = held.answers(move || {
        manager.pods_count();
        manager.capacity();
    });
    let drivers = async {
        match &admin.cluster {
            Some(cluster) => paths::wrong(&cluster.bridge).await,
            None => Wrong::new(),
        }
    };
    let found = tokio::join!(
        in_time("the pods and their claims", pods),
        in_time("the task for driver files", admin.registry.answers(DriverKind::Wasm)),
        in_time("the task for plugins", admin.registry.answers(DriverKind::Grpc)),
        in_time("the checkpoint's writer", admin.checkpoint.answers()),
        drivers,
    );
    [found.0, found.1, found.2, found.3].into_iter().flatten().chain(found.4).collect()
}

/// What is wrong with it. None: it answers.
async fn in_time(who: &str, answers: impl Future<Output = bool>) -> Option<String> {
    match timeout(limit::LIVE_DEADLINE, answers).await {
        Ok(true) => None,
        Ok(false) => Some(format!("{who} ended")),
        Err(_) => Some(format!("{who} did not answer within {:?}", limit::LIVE_DEADLINE)),
    }
}

/// What was there when the daemon started.
pub struct AtStart {
    folders: Vec<(PathBuf, List)>,
    found: Mutex<Found>,
    /// It was ready once: what comes later does not change that.
    ready: AtomicBool,
}

/// Names of what is in a folder, as the registry has them.
type List = fn(&Path) -> io::Result<Vec<String>>;

/// None: a folder could not be listed yet.
type Found = Vec<Option<Vec<String>>>;

impl AtStart {
    /// Of the drivers' folder and that of registration sockets. What cannot be listed is awaited.
    pub fn look(drivers: &Path, sockets: &Path) -> Self {
        let folders: Vec<(PathBuf, List)> = vec![
            (drivers.to_owned(), file_watch::present),
            (sockets.to_owned(), |folder| {
                let found = sockets::present(folder)?;
                Ok(found.into_iter().map(|socket| socket.display().to_string()).collect())
            }),
        ];
        let at_start =
            Self { found: Mutex::new(vec![None; folders.len()]), folders, ready: AtomicBool::new(false) };
        // What is wrong is said to those who ask.
        drop(at_start.list());
        at_start
    }

    /// Lists what could not be listed before; the folders that still cannot be.
    fn list(&self) -> Wrong {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wrong = Wrong::new();
        for ((folder, list), found) in self.folders.iter().zip(found.iter_mut()) {
            if found.is_none() {
                match list(folder) {
                    Ok(names) => *found = Some(names),
                    Err(error) => {
                        wrong.push(format!(
                            "the folder {} cannot be listed: {}",
                            folder.display(),
                            chain(&error)
                        ));
                    }
                }
            }
        }
        wrong
    }

    /// Becomes true when all of it is loaded, failed or gone, and stays so.
    pub fn settled(
        self: &Arc<Self>,
        registry: Registry,
        changes: &Changes,
        tasks: &Tasks,
    ) -> watch::Receiver<bool> {
        let (at_start, mut told, stopped) = (self.clone(), changes.listen(), tasks.stopped());
        let (sender, receiver) = watch::channel(false);
        tasks.spawn("settling", async move {
            tokio::pin!(stopped);
            while !at_start.look_again(&registry).await {
                tokio::select! {
                    () = &mut stopped => return,
                    // Whatever was told, or missed, is a reason to look.
                    _ = told.recv() => {}
                    () = tokio::time::sleep(limit::LIVE_LOOK_PERIOD) => {}
                }
            }
            // Nobody need wait for it.
            sender.send_replace(true);
        });
        receiver
    }

    async fn look_again(self: &Arc<Self>, registry: &Registry) -> bool {
        let (at_start, views) = (self.clone(), registry.list());
        let look = tokio::task::spawn_blocking(move || still_awaited(&at_start, &views));
        look.await.is_ok_and(|awaited| awaited.is_empty())
    }

    fn names(&self) -> Vec<(PathBuf, String)> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let each = self.folders.iter().zip(found.iter());
        each.flat_map(|((folder, _), names)| {
            names.iter().flatten().map(move |name| (folder.join(name), name.clone()))
        })
        .collect()
    }
}

/// What a daemon that is not ready waits for, a line each.
pub(super) async fn awaited(admin: &Admin) -> Wrong {
    let at_start = admin.at_start.clone();
    if at_start.ready.load(Relaxed) {
        return Wrong::new();
    }
    let views = admin.registry.list();
    // A folder may be on a file system that hangs: not for a thread that serves.
    let looked = at_start.clone();
    let look = tokio::task::spawn_blocking(move || still_awaited(&looked, &views));
    let unseen = |error| vec![format!("the folders were not looked at: {}", chain(&error))];
    let mut wrong = look.await.unwrap_or_else(unseen);
    wrong.extend(admin.cluster.iter().flat_map(|cluster| cluster.awaited()));
    if wrong.is_empty() {
        at_start.ready.store(true, Relaxed);
    }
    wrong
}

fn still_awaited(at_start: &AtStart, views: &[DriverView]) -> Wrong {
    let mut wrong = at_start.list();
    for (path, source) in at_start.names() {
        match views.iter().find(|view| view.source == source) {
            Some(view) if is_under_way(view) => {
                wrong.push(format!("{source} is {}: it is being loaded", view.state.as_str()));
            }
            Some(_) => {}
            // It went away again before anybody looked at it.
            None if std::fs::symlink_metadata(&path).is_err() => {}
            None => wrong.push(format!("{source} was not looked at yet")),
        }
    }
    wrong
}

/// A plugin that is described has registered, and its service's socket is its own business.
fn is_under_way(view: &DriverView) -> bool {
    match view.kind {
        DriverKind::Wasm => view.state.is_under_way(),
        DriverKind::Grpc => view.state == DriverState::Seen,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn what_was_there_at_the_start_is_awaited_until_it_is_loaded_or_failed_or_gone() {
        let folder = tempfile::tempdir().unwrap();
        let (drivers, sockets) = (folder.path().join("drivers"), folder.path().join("sockets"));
        std::fs::create_dir(&drivers).unwrap();
        for name in ["a.wasm", "b.wasm", "c.wasm"] {
            std::fs::write(drivers.join(name), "x").unwrap();
        }
        let registry = Registry::new(Changes::default());
        let at_start = AtStart::look(&drivers, &sockets);
        // What comes later is not awaited.
        std::fs::write(drivers.join("later.wasm"), "x").unwrap();
        let awaited = || still_awaited(&at_start, &registry.list());
        let unseen = |name: &str| format!("{name} was not looked at yet");
        assert_eq!(awaited(), ["a.wasm", "b.wasm", "c.wasm"].map(unseen));
        registry.update(DriverKind::Wasm, "a.wasm", |view| view.state = DriverState::Compiled);
        registry.update(DriverKind::Wasm, "b.wasm", |view| view.state = DriverState::Failed);
        std::fs::remove_file(drivers.join("c.wasm")).unwrap();
        assert_eq!(awaited(), ["a.wasm is compiled: it is being loaded"]);
        registry.update(DriverKind::Wasm, "a.wasm", |view| view.state = DriverState::Serving);
        assert_eq!(awaited(), Wrong::new());
    }

    #[test]
    fn a_folder_that_cannot_be_listed_is_awaited() {
        let folder = tempfile::tempdir().unwrap();
        let (drivers, sockets) = (folder.path().join("drivers"), folder.path().join("sockets"));
        std::fs::write(&drivers, "a file").unwrap();
        let at_start = AtStart::look(&drivers, &sockets);
        let wrong = still_awaited(&at_start, &[]);
        assert!(wrong.len() == 1 && wrong[0].contains("drivers cannot be listed"), "{wrong:?}");
        std::fs::remove_file(&drivers).unwrap();
        assert_eq!(still_awaited(&at_start, &[]), Wrong::new());
    }

    #[tokio::test(start_paused = true)]
    async fn however_many_ask_there_is_one_look_at_a_time_and_one_in_a_second() {
        let looks = Arc::new(AtomicU64::new(0));
        let counted = looks.clone();
        let live = Live::new(move || {
            let number = counted.fetch_add(1, Relaxed);
            async move {
                tokio::time::sleep(limit::LIVE_LOOK_PERIOD * 2).await;
                vec![format!("look {number}")]
            }
            .boxed()
        });
        let told = futures::future::join_all((0..1000).map(|_| live.look())).await;
        assert!(told.iter().all(|told| *told == ["look 0"]));
        // It took longer than the period, so the next one looks again.
        assert_eq!(live.look().await, ["look 1"]);
        assert_eq!(looks.load(Relaxed), 2);
    }

    /// A lock taken in the look itself would have kept the thread that serves, and no deadline ends that.
    #[tokio::test(start_paused = true)]
    async fn a_lock_that_is_not_given_back_keeps_one_thread_and_is_told() {
        let (held, begun) = (Held::default(), Arc::new(AtomicU64::new(0)));
        let (lock, given_back) = std::sync::mpsc::channel::<()>();
        let given_back = Arc::new(Mutex::new(given_back));
        let look = || {
            let (given_back, begun) = (given_back.clone(), begun.clone());
            let look = move || {
                begun.fetch_add(1, Relaxed);
                assert!(given_back.lock().unwrap().recv().is_err());
            };
            in_time("the pods", held.clone().answers(look))
        };
        for _ in 0..2 {
            let (told, ()) = tokio::join!(look(), tokio::time::advance(limit::LIVE_DEADLINE * 2));
            assert_eq!(told.unwrap(), "the pods did not answer within 5s");
        }
        drop(lock);
        assert_eq!((look().await, begun.load(Relaxed)), (None, 2), "one that waited, and the last");
        let panics = held.answers(|| panic!("on purpose"));
        assert_eq!(in_time("the pods", panics).await.unwrap(), "the pods ended");
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_answer_is_named() {
        assert_eq!(in_time("the writer", async { true }).await, None);
        assert_eq!(in_time("the writer", async { false }).await.unwrap(), "the writer ended");
        let late = in_time("the writer", std::future::pending()).await.unwrap();
        assert_eq!(late, "the writer did not answer within 5s");
    }
}
