//! Liveness and readiness of the daemon.
//!
//! It is live if its manager, the tasks that process the results of discovery and the checkpoint's writer respond, and on a Kubernetes node
//! the path of each driver that is offered to the kubelet. No driver is called. At any number of requests, one check runs at a time, with a
//! second between two.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::Admin;
use crate::admin::LIVE_DEADLINE;
use nodedock_base::changes::Changes;
use nodedock_base::error::chain;
use nodedock_base::file;
use nodedock_base::tasks::Tasks;
use nodedock_core::registry::{DriverState, DriverView, Registry};
use nodedock_model::DriverKind;
use nodedock_native::sockets;
use nodedock_wasm::driver_image::DriverImage;
use nodedock_wasm::file_watch;

/// Minimum interval of liveness checks, for any number of requests.
const LIVE_LOOK_PERIOD: Duration = Duration::from_secs(1);

/// A line for each problem, and when they were found.
type LastCheck = tokio::sync::Mutex<Option<(Instant, Vec<String>)>>;

/// Checks whether the daemon lives.
pub(super) struct Liveness {
    admin: Admin,
    last: LastCheck,
    locks: LockProbe,
}

impl Liveness {
    pub(super) fn new(admin: Admin) -> Self {
        Self {
            admin,
            last: LastCheck::default(),
            locks: LockProbe::default(),
        }
    }

    /// Returns the parts of the daemon that do not respond, a line each. A check is not cancelled when its client disconnects.
    pub(super) async fn problems(self: Arc<Self>) -> Vec<String> {
        let tasks = self.admin.tasks.clone();
        let check = async move { shared(&self.last, self.check()).await };
        tasks
            .complete("liveness", check)
            .await
            .unwrap_or_else(|| vec!["the check itself panicked".to_owned()])
    }

    async fn check(&self) -> Vec<String> {
        let (admin, manager) = (&self.admin, self.admin.manager.clone());
        let pods = self.locks.answers(move || {
            // Takes the lock of the claims too.
            manager.pods.count();
            manager.devices.capacity();
        });
        let paths = async {
            match &admin.cluster {
                Some(cluster) => cluster.broken_paths().await,
                None => Vec::new(),
            }
        };
        let (pods, files, plugins, writer, paths) = tokio::join!(
            in_time("the pods and their claims", pods),
            in_time(
                "the task for driver files",
                admin.registry.reloads.answers(DriverKind::Wasm)
            ),
            in_time(
                "the task for plugins",
                admin.registry.reloads.answers(DriverKind::Grpc)
            ),
            in_time("the checkpoint's writer", admin.checkpoint.answers()),
            paths,
        );
        [pods, files, plugins, writer]
            .into_iter()
            .flatten()
            .chain(paths)
            .collect()
    }
}

/// Returns the problems of the last check if it is under way or ended a moment ago, else those of a new one.
async fn shared(last: &LastCheck, check: impl Future<Output = Vec<String>>) -> Vec<String> {
    let mut last = last.lock().await;
    if let Some((ended, problems)) = &*last
        && ended.elapsed() < LIVE_LOOK_PERIOD
    {
        return problems.clone();
    }
    let problems = check.await;
    *last = Some((Instant::now(), problems.clone()));
    problems
}

/// Takes locks on a thread of its own, one at a time: a lock that is never released keeps that thread and no other.
#[derive(Default)]
struct LockProbe(Arc<tokio::sync::Mutex<()>>);

impl LockProbe {
    /// Returns when `take` has ended. False: it panicked.
    async fn answers(&self, take: impl FnOnce() + Send + 'static) -> bool {
        let only_one = self.0.clone().lock_owned().await;
        tokio::task::spawn_blocking(move || {
            take();
            drop(only_one);
        })
        .await
        .is_ok()
    }
}

/// Returns the problem of a part, if it has one.
async fn in_time(part: &str, answers: impl Future<Output = bool>) -> Option<String> {
    match timeout(LIVE_DEADLINE, answers).await {
        Ok(true) => None,
        Ok(false) => Some(format!("{part} ended")),
        Err(_) => Some(format!("{part} did not answer within {:?}", LIVE_DEADLINE)),
    }
}

/// The drivers and registration sockets that were there when the daemon started.
pub struct AtStart {
    /// Driver images, as the registry has them, and those that the config names now.
    images: Vec<String>,
    named: watch::Receiver<Vec<DriverImage>>,
    directories: Mutex<[Directory; 2]>,
    /// It was ready once: what comes later does not change that.
    ready: AtomicBool,
}

struct Directory {
    path: PathBuf,
    list: List,
    /// `None`: it could not be listed yet.
    names: Option<Vec<String>>,
}

/// Lists the names of what is in a directory, as the registry has them.
type List = fn(&Path) -> io::Result<Vec<String>>;

impl Directory {
    fn new(path: &Path, list: List) -> Self {
        Self {
            path: path.to_owned(),
            list,
            names: list(path).ok(),
        }
    }
}

fn list_sockets(directory: &Path) -> io::Result<Vec<String>> {
    let found = sockets::present(directory)?;
    Ok(found
        .into_iter()
        .map(|socket| socket.display().to_string())
        .collect())
}

impl AtStart {
    /// Lists the directories of drivers and of registration sockets. One that cannot be listed is listed later.
    pub fn look(drivers: &Path, named: watch::Receiver<Vec<DriverImage>>, sockets: &Path) -> Self {
        let directories = [
            Directory::new(drivers, file_watch::present),
            Directory::new(sockets, list_sockets),
        ];
        let images = named.borrow().iter().map(DriverImage::source).collect();
        Self {
            images,
            named,
            directories: Mutex::new(directories),
            ready: AtomicBool::new(false),
        }
    }

    /// Becomes true when all of it is loaded, failed or removed, and stays true.
    pub fn settled(
        self: &Arc<Self>,
        registry: Registry,
        changes: &Changes,
        tasks: &Tasks,
    ) -> watch::Receiver<bool> {
        let (at_start, mut changes) = (self.clone(), changes.listen());
        let (sender, receiver) = watch::channel(false);
        tasks.spawn_until_stopped("settling", async move {
            while !at_start.awaited(&registry).await.is_empty() {
                tokio::select! {
                    // A change, and one that was missed, is a reason to look.
                    _ = changes.recv() => {}
                    () = tokio::time::sleep(LIVE_LOOK_PERIOD) => {}
                }
            }
            sender.send_replace(true);
        });
        receiver
    }

    /// Returns what is not loaded yet, a line each.
    async fn awaited(self: &Arc<Self>, registry: &Registry) -> Vec<String> {
        let (at_start, views) = (self.clone(), registry.list());
        // A directory may be on a file system that hangs.
        let look = tokio::task::spawn_blocking(move || at_start.unloaded(&views));
        look.await.unwrap_or_else(|error| {
            vec![format!(
                "the directories were not checked: {}",
                chain(&error)
            )]
        })
    }

    fn unloaded(&self, views: &[DriverView]) -> Vec<String> {
        let named = self.named.borrow().clone();
        let images = self.images.iter().filter_map(|source| {
            unloaded(source, views, || {
                named.iter().all(|image| image.source() != *source)
            })
        });
        let mut directories = self.directories.lock();
        images
            .chain(
                directories
                    .iter_mut()
                    .flat_map(|directory| directory.unloaded(views)),
            )
            .collect()
    }
}

impl Directory {
    fn unloaded(&mut self, views: &[DriverView]) -> Vec<String> {
        let names = match self
            .names
            .take()
            .map_or_else(|| (self.list)(&self.path), Ok)
        {
            Ok(names) => self.names.insert(names),
            Err(error) => {
                let path = self.path.display();
                return vec![format!(
                    "the directory {path} cannot be listed: {}",
                    chain(&error)
                )];
            }
        };
        names
            .iter()
            .filter_map(|source| {
                unloaded(source, views, || {
                    matches!(file::symlink_metadata(&self.path.join(source)), Ok(None))
                })
            })
            .collect()
    }
}

/// Returns why a source is awaited, if it is. `is_gone`: it was removed before the registry knew it.
fn unloaded(source: &str, views: &[DriverView], is_gone: impl FnOnce() -> bool) -> Option<String> {
    match views.iter().find(|view| view.source == source) {
        Some(view) if is_under_way(view) => Some(format!(
            "{source} is {}: it is being loaded",
            view.state.as_str()
        )),
        Some(_) => None,
        None if is_gone() => None,
        None => Some(format!("{source} was not looked at yet")),
    }
}

/// A plugin that is described has registered; its service's socket is the plugin's own concern.
fn is_under_way(view: &DriverView) -> bool {
    match view.kind {
        DriverKind::Wasm => view.state.is_under_way(),
        DriverKind::Grpc => view.state == DriverState::Seen,
        DriverKind::Adapter | DriverKind::Cdi => false,
    }
}

/// Returns what a daemon that is not ready waits for, a line each.
pub(super) async fn awaited(admin: &Admin) -> Vec<String> {
    if admin.at_start.ready.load(Relaxed) {
        return Vec::new();
    }
    let mut awaited = admin.at_start.awaited(&admin.registry).await;
    awaited.extend(admin.cluster.iter().flat_map(|cluster| cluster.awaited()));
    if awaited.is_empty() {
        admin.at_start.ready.store(true, Relaxed);
    }
    awaited
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn readiness_waits_for_initial_drivers() {
        let directory = tempfile::tempdir().unwrap();
        let (drivers, sockets) = (
            directory.path().join("drivers"),
            directory.path().join("sockets"),
        );
        std::fs::create_dir(&drivers).unwrap();
        for name in ["a.wasm", "b.wasm", "c.wasm"] {
            std::fs::write(drivers.join(name), "x").unwrap();
        }
        let registry = Registry::new(
            Changes::default(),
            nodedock_base::conditions::Conditions::default(),
            None,
        );
        let (name, directory) = ("image".to_owned(), directory.path().to_owned());
        let image = DriverImage {
            name,
            side_files: directory.clone(),
            directory,
        };
        let images = watch::Sender::new(vec![image]);
        let at_start = AtStart::look(&drivers, images.subscribe(), &sockets);
        // What comes later is not awaited.
        std::fs::write(drivers.join("later.wasm"), "x").unwrap();
        let awaited = || at_start.unloaded(&registry.list());
        let unseen = |name: &str| format!("{name} was not looked at yet");
        assert_eq!(
            awaited(),
            ["image.wasm", "a.wasm", "b.wasm", "c.wasm"].map(unseen)
        );
        let image = images.send_replace(Vec::new());
        assert_eq!(awaited(), ["a.wasm", "b.wasm", "c.wasm"].map(unseen));
        images.send_replace(image);
        registry
            .sources
            .update(DriverKind::Wasm, "image.wasm", |view| {
                view.state = DriverState::Failed
            });
        registry.sources.update(DriverKind::Wasm, "a.wasm", |view| {
            view.state = DriverState::Compiled
        });
        registry.sources.update(DriverKind::Wasm, "b.wasm", |view| {
            view.state = DriverState::Failed
        });
        std::fs::remove_file(drivers.join("c.wasm")).unwrap();
        assert_eq!(awaited(), ["a.wasm is compiled: it is being loaded"]);
        registry.sources.update(DriverKind::Wasm, "a.wasm", |view| {
            view.state = DriverState::Serving
        });
        assert_eq!(awaited(), Vec::<String>::new());
    }

    #[test]
    fn unlistable_directory_delays_readiness() {
        let directory = tempfile::tempdir().unwrap();
        let (drivers, sockets) = (
            directory.path().join("drivers"),
            directory.path().join("sockets"),
        );
        std::fs::write(&drivers, "a file").unwrap();
        let images = watch::Sender::new(Vec::new());
        let at_start = AtStart::look(&drivers, images.subscribe(), &sockets);
        let wrong = at_start.unloaded(&[]);
        assert!(
            wrong.len() == 1 && wrong[0].contains("drivers cannot be listed"),
            "{wrong:?}"
        );
        std::fs::remove_file(&drivers).unwrap();
        assert_eq!(at_start.unloaded(&[]), Vec::<String>::new());
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_probes_share_one_check() {
        let (last, looks) = (LastCheck::default(), AtomicU64::new(0));
        let look = || {
            shared(&last, async {
                let number = looks.fetch_add(1, Relaxed);
                tokio::time::sleep(LIVE_LOOK_PERIOD * 2).await;
                vec![format!("look {number}")]
            })
        };
        let found = futures::future::join_all((0..1000).map(|_| look())).await;
        assert!(found.iter().all(|found| *found == ["look 0"]));
        tokio::time::advance(LIVE_LOOK_PERIOD).await;
        assert_eq!(look().await, ["look 1"]);
        assert_eq!(looks.load(Relaxed), 2);
    }

    /// A lock taken in the look itself would have kept the thread that serves, and no deadline ends that.
    #[tokio::test(start_paused = true)]
    async fn stuck_lock_blocks_only_one_thread() {
        let (locks, begun) = (LockProbe::default(), Arc::new(AtomicU64::new(0)));
        let (lock, released) = std::sync::mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let look = || {
            let (released, begun) = (released.clone(), begun.clone());
            let look = move || {
                begun.fetch_add(1, Relaxed);
                assert!(released.lock().recv().is_err());
            };
            in_time("the pods", locks.answers(look))
        };
        for _ in 0..2 {
            let (reported, ()) = tokio::join!(look(), tokio::time::advance(LIVE_DEADLINE * 2));
            assert_eq!(reported.unwrap(), "the pods did not answer within 5s");
        }
        drop(lock);
        assert_eq!(
            (look().await, begun.load(Relaxed)),
            (None, 2),
            "one that waited, and the last"
        );
        let panics = locks.answers(|| panic!("on purpose"));
        assert_eq!(in_time("the pods", panics).await.unwrap(), "the pods ended");
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_answer_is_named() {
        assert_eq!(in_time("the writer", async { true }).await, None);
        assert_eq!(
            in_time("the writer", async { false }).await.unwrap(),
            "the writer ended"
        );
        let late = in_time("the writer", std::future::pending()).await.unwrap();
        assert_eq!(late, "the writer did not answer within 5s");
    }
}
