//! The workers of the drivers directory, by the names of their files without `.wasm`.
//!
//! A file that is gone may come back while its worker still runs. The worker of the new file begins when that one has ended, because a
//! worker takes its driver out of service at its end.

use std::collections::HashMap;

use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{mpsc, oneshot, watch};

use crate::files::file_watch::DriverFiles;
use nodedock_core::registry::{ReloadRequest, Reloaded};

/// Resolves, with an error, when a worker has ended.
pub(super) type Ended = oneshot::Receiver<()>;

pub(super) struct Handle {
    /// None: the file is gone, or was not reported yet.
    pub(super) files: watch::Sender<Option<DriverFiles>>,
    /// Requests to load the same files again, each with the sender of its result.
    pub(super) reloads: mpsc::Sender<oneshot::Sender<Reloaded>>,
    pub(super) ended: Ended,
}

#[derive(Default)]
pub(super) struct Workers {
    running: HashMap<String, Handle>,
    /// Workers whose file is gone.
    ending: HashMap<String, Ended>,
}

impl Workers {
    /// Has a file's worker load it; `start` makes a worker where there is none, which begins when the one before has ended.
    pub(super) fn load(
        &mut self,
        files: DriverFiles,
        start: impl FnOnce(&str, Option<Ended>) -> Handle,
    ) {
        let Self { running, ending } = self;
        let stem = files.stem.clone();
        running
            .entry(stem.clone())
            .or_insert_with(|| start(&stem, ending.remove(&stem)))
            .files
            .send_replace(Some(files));
    }

    /// Reports to a file's worker that the file is gone.
    pub(super) fn remove(&mut self, stem: String) {
        self.ending
            .retain(|_, ended| ended.try_recv() == Err(TryRecvError::Empty));
        if let Some(Handle { files, ended, .. }) = self.running.remove(&stem) {
            files.send_replace(None);
            self.ending.insert(stem, ended);
        }
    }

    /// Has one worker load its file again, if there is one.
    pub(super) fn reload(&self, request: ReloadRequest) {
        let stem = request.source.strip_suffix(".wasm").unwrap_or_default();
        if let Some(worker) = self.running.get(stem) {
            request.hand_to(&worker.reloads, |done| done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A simulated worker.
    struct Simulated {
        files: watch::Receiver<Option<DriverFiles>>,
        reloads: mpsc::Receiver<oneshot::Sender<Reloaded>>,
        end: oneshot::Sender<()>,
        before: Option<Ended>,
    }

    fn load(workers: &mut Workers, stem: &str) -> Option<Simulated> {
        let mut simulated = None;
        let start = |_: &str, before| {
            let (sender, files) = watch::channel(None);
            let ((requests, reloads), (end, ended)) = (mpsc::channel(8), oneshot::channel());
            simulated = Some(Simulated {
                files,
                reloads,
                end,
                before,
            });
            Handle {
                files: sender,
                reloads: requests,
                ended,
            }
        };
        let wasm = Ok(format!("/drivers/{stem}.wasm").into());
        let (stem, is_image) = (stem.to_owned(), false);
        let files = DriverFiles {
            stem,
            is_image,
            wasm,
            grant: None,
            config: None,
            signature: None,
        };
        workers.load(files, start);
        simulated
    }

    #[test]
    fn worker_starts_after_its_previous_one() {
        let mut workers = Workers::default();
        let mut first = load(&mut workers, "a").unwrap();
        assert!(first.before.is_none() && first.files.borrow_and_update().is_some());
        assert!(load(&mut workers, "a").is_none() && first.files.has_changed().unwrap());
        for stem in ["a", "b"] {
            workers.reload(ReloadRequest {
                source: format!("{stem}.wasm"),
                done: oneshot::channel().0,
            });
        }
        assert!(first.reloads.try_recv().is_ok() && first.reloads.try_recv().is_err());
        workers.remove("a".to_owned());
        assert!(first.files.borrow().is_none());

        let mut second = load(&mut workers, "a").unwrap();
        let before = second.before.as_mut().unwrap();
        assert_eq!(before.try_recv(), Err(TryRecvError::Empty));
        drop(first.end);
        assert_eq!(before.try_recv(), Err(TryRecvError::Closed));

        workers.remove("a".to_owned());
        drop(second);
        workers.remove("b".to_owned());
        assert!(workers.ending.is_empty() && load(&mut workers, "a").unwrap().before.is_none());
    }
}
