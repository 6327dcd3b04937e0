//! Waits for files.

use std::path::Path;

use notify::{RecursiveMode, Watcher};
use tokio::time::timeout;

use crate::DEADLINE;

/// Returns what `condition` finds, checking it whenever the file or directory changes.
pub async fn until_path<T>(
    path: &Path,
    what: &str,
    condition: impl Fn() -> Result<T, String>,
) -> T {
    let (sender, mut events) = tokio::sync::mpsc::channel(1);
    // A full channel leads to a question as well as a new event does.
    let mut watcher = notify::recommended_watcher(move |_| {
        let _ = sender.try_send(());
    });
    let watcher = watcher.as_mut().expect("inotify");
    watcher
        .watch(path, RecursiveMode::NonRecursive)
        .expect("watch a path that is there");
    let mut last = "nothing".to_owned();
    let found = timeout(DEADLINE, async {
        loop {
            match condition() {
                Ok(found) => return found,
                Err(state) => last = state,
            }
            events.recv().await.expect("the watcher has the sender");
        }
    });
    let found = found.await.ok();
    found.unwrap_or_else(|| panic!("waited in vain until {what}; last seen: {last}"))
}
