//! Monitors the writer: sets conditions of the node for its errors, and while commits fail tests repeatedly whether the disk accepts
//! writes, so that free space is detected without a request.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::status::Status;
use super::writer::Work;
use super::{Checkpoint, CommitError};
use crate::checkpoint::CHECKPOINT_SLOW;
use nodedock_base::backoff::Backoff;
use nodedock_base::batches::Entered;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Problem, ProblemCode};

/// Backoff of testing whether the disk accepts writes again; doubled up to the second.
const CHECKPOINT_PROBE_MIN: Duration = Duration::from_secs(1);
const CHECKPOINT_PROBE_MAX: Duration = Duration::from_secs(30);

/// Time of the next test, while commits fail.
struct Probes {
    backoff: Backoff,
    next: Option<Instant>,
}

impl Checkpoint {
    /// Sets conditions of the writer under `subject`, the file's path, and retries while commits fail, until the tasks stop.
    pub async fn keep(self, subject: String, conditions: Conditions, tasks: Tasks) {
        monitor(
            &self.writer.server().status,
            || self.try_probe(),
            &subject,
            &conditions,
            &tasks,
        )
        .await;
    }

    /// Starts an empty commit, whose outcome is in the status; not if others wait, which show the same.
    fn try_probe(&self) {
        // One that waits is committed without a caller.
        if let Entered::First(leader) = self.writer.enter(Work::Commit(Vec::new())) {
            drop(tokio::task::spawn_blocking(move || leader.lead()));
        }
    }
}

async fn monitor(
    status: &Status,
    probe: impl Fn(),
    subject: &str,
    conditions: &Conditions,
    tasks: &Tasks,
) {
    let backoff = Backoff::new(CHECKPOINT_PROBE_MIN, CHECKPOINT_PROBE_MAX);
    let mut probes = Probes {
        backoff,
        next: None,
    };
    loop {
        let now = status.look();
        let slow_at = now.under_way.map(|began| began + CHECKPOINT_SLOW);
        let (slow, not_yet) = match slow_at {
            Some(at) if at <= Instant::now() => (true, None),
            at => (false, at),
        };
        report(
            conditions,
            subject,
            now.failure.as_ref().map(|(failure, _)| failure),
            slow,
        );
        if probes.is_due(now.failure.is_some()) {
            probe();
        }
        let wake = not_yet.into_iter().chain(probes.next).min();
        tokio::select! {
            // Safe to drop: the conditions end with the process.
            () = tasks.stopped() => return,
            // Safe to drop: the next iteration sees later changes.
            () = status.news() => {}
            () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
        }
    }
}

impl Probes {
    /// Returns whether a test is due, and schedules the next one.
    fn is_due(&mut self, failing: bool) -> bool {
        if !failing {
            self.backoff.reset();
            self.next = None;
            return false;
        }
        let due = self.next.is_some_and(|at| at <= Instant::now());
        if due || self.next.is_none() {
            self.next = Some(Instant::now() + self.backoff.delay());
        }
        due
    }
}

/// Sets the conditions of a failed and of a slow commit, and clears the others.
fn report(conditions: &Conditions, subject: &str, failure: Option<&CommitError>, slow: bool) {
    let code = failure.map(CommitError::code);
    for other in CommitError::CODES
        .into_iter()
        .filter(|other| Some(*other) != code)
    {
        conditions.clear(other, subject);
    }
    if let Some(failure) = failure {
        conditions.set(subject, failure.problem());
    }
    if !slow {
        return conditions.clear(ProblemCode::CheckpointSlow, subject);
    }
    let seconds = CHECKPOINT_SLOW.as_secs();
    let words = format!(
        "a commit has been running for more than {seconds} s, and all other changes wait for it"
    );
    conditions.set(
        subject,
        Problem::unavailable(ProblemCode::CheckpointSlow, words),
    );
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::mpsc;

    use super::super::StoreError;
    use super::*;
    use nodedock_base::changes::Changes;
    use nodedock_model::Changed;

    /// A monitor of a writer that the test controls.
    struct Scene {
        status: Arc<Status>,
        probes: mpsc::UnboundedReceiver<()>,
        conditions: Conditions,
        changes: tokio::sync::broadcast::Receiver<Changed>,
        tasks: Tasks,
    }

    impl Scene {
        fn new() -> Self {
            let (changes, tasks, status) = (
                Changes::default(),
                Tasks::new(),
                Arc::new(Status::default()),
            );
            let (probe, probes) = mpsc::unbounded_channel();
            let listener = changes.listen();
            let conditions = Conditions::new(changes);
            let (watched, reported, stop) = (status.clone(), conditions.clone(), tasks.clone());
            tasks.spawn("monitor", async move {
                let probe = || probe.send(()).unwrap();
                monitor(&watched, probe, "/checkpoint", &reported, &stop).await;
            });
            Self {
                status,
                probes,
                conditions,
                changes: listener,
                tasks,
            }
        }

        fn fail(&self, kind: io::ErrorKind) {
            self.status
                .failed(&CommitError::Store(Arc::new(StoreError::of_system(kind))));
        }

        fn succeed(&self) {
            self.status.succeeded(1, 1, Duration::from_millis(1));
        }

        async fn reported(&mut self) -> String {
            self.changes.recv().await.unwrap().state
        }

        fn standing(&self) -> Vec<String> {
            self.conditions
                .list()
                .into_iter()
                .map(|condition| condition.problem.code)
                .collect()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_probed_with_growing_delays() {
        let mut scene = Scene::new();
        scene.fail(io::ErrorKind::StorageFull);
        assert_eq!(scene.reported().await, "checkpoint-disk-full");
        let began = Instant::now();
        let mut at = Vec::new();
        for _ in 0..7 {
            scene.probes.recv().await.unwrap();
            at.push(began.elapsed().as_secs());
            scene.fail(io::ErrorKind::StorageFull);
        }
        assert_eq!(at, [1, 3, 7, 15, 31, 61, 91]);
        scene.fail(io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(
            (scene.reported().await, scene.reported().await),
            ("over".into(), "checkpoint-read-only".into())
        );
        assert_eq!(scene.standing(), ["checkpoint-read-only"]);

        scene.status.begin();
        scene.succeed();
        assert_eq!(scene.reported().await, "over");
        assert_eq!(scene.standing(), Vec::<String>::new());
        let silence = tokio::time::timeout(Duration::from_secs(3600), scene.probes.recv()).await;
        assert!(silence.is_err(), "nothing is probed that is well");
        scene.fail(io::ErrorKind::StorageFull);
        assert_eq!(scene.reported().await, "checkpoint-disk-full");
        let began = Instant::now();
        scene.probes.recv().await.unwrap();
        assert_eq!(began.elapsed().as_secs(), 1, "the backoff is reset");
        assert!(scene.tasks.drain(Duration::from_secs(1)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_commit_sets_condition_until_finished() {
        let mut scene = Scene::new();
        for _ in 0..3 {
            scene.status.begin();
            scene.status.takes_long();
            tokio::time::sleep(CHECKPOINT_SLOW / 2).await;
            scene.succeed();
        }
        assert_eq!(scene.standing(), Vec::<String>::new());
        scene.status.begin();
        scene.status.takes_long();
        let began = Instant::now();
        assert_eq!(scene.reported().await, ProblemCode::CheckpointSlow);
        assert_eq!(began.elapsed().as_secs(), CHECKPOINT_SLOW.as_secs());
        assert!(*scene.status.takes_writes().borrow(), "it has not failed");
        scene.fail(io::ErrorKind::StorageFull);
        let reported = [scene.reported().await, scene.reported().await];
        assert_eq!(reported, ["checkpoint-disk-full", "over"]);
        assert!(!*scene.status.takes_writes().borrow());
        assert_eq!(scene.standing(), ["checkpoint-disk-full"]);
    }
}
