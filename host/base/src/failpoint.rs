//! Places where a test lets the daemon die as by a crash: at once, with nothing unwound, flushed or closed. Without the feature
//! `failpoints`, which no shipped build turns on, they are nothing.

/// Declares the points with their names, which tests write into `FAILPOINTS`.
macro_rules! points {
    ($($(#[$doc:meta])* $point:ident = $name:literal,)+) => {
        /// A seam between two steps of which a crash may let the first be the last.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Point {
            $($(#[$doc])* $point,)+
        }

        impl Point {
            pub const ALL: &[Self] = &[$(Self::$point,)+];

            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)+
                }
            }
        }
    };
}

points! {
    /// At start: the checkpoint is read, the CDI folder is not.
    CheckpointOpened = "checkpoint-opened",
    /// At start: what a lost checkpoint had is taken back, if it was lost; the claim manager is not there yet.
    Recovered = "recovered",
    /// At start: a CDI file without an owner is about to be removed.
    OrphanFound = "orphan-found",
    OrphanRemoved = "orphan-removed",
    /// At start: a claim's CDI files are about to be compared with the checkpoint.
    ReconcileClaim = "reconcile-claim",
    PrepareDecided = "prepare-decided",
    /// The intents are durable.
    PrepareIntended = "prepare-intended",
    PrepareCall = "prepare-call",
    /// The driver has answered, and nobody else knows.
    PrepareAnswered = "prepare-answered",
    /// The CDI files of a result are there; the result may be durable or not.
    PrepareFilesWritten = "prepare-files-written",
    /// A result is durable; its CDI files may be there or not.
    PrepareCommitted = "prepare-committed",
    /// Results and files are there; the answer is not given.
    PrepareDone = "prepare-done",
    /// A claim that was refused for good is durably on its way out.
    RollbackIntended = "rollback-intended",
    RollbackDone = "rollback-done",
    UnprepareIntended = "unprepare-intended",
    UnprepareCall = "unprepare-call",
    UnprepareAnswered = "unprepare-answered",
    /// Every driver gave the claim up, and its CDI files are gone.
    UnprepareFilesRemoved = "unprepare-files-removed",
    /// The record is gone; the answer is not given.
    UnprepareForgotten = "unprepare-forgotten",
    /// Of a driver's file that is kept by digest, what is beside it is written and the file is not.
    KeptStaged = "kept-staged",
    /// A new version's file is kept; it does not serve yet.
    KeptWritten = "kept-written",
    /// A new version serves, and its predecessor has not been told to stop.
    DriverSwitched = "driver-switched",
    /// The code that prepared a claim is about to be asked to give it up, since the version that serves did not.
    PredecessorCall = "predecessor-call",
    /// It has answered, and nobody else knows.
    PredecessorAnswered = "predecessor-answered",
    /// Of a kept file that no claim needs any more, the file is removed and what is beside it is not.
    KeptForgotten = "kept-forgotten",
    /// Devices of extended resources are chosen for a pod, and that is durable.
    AllocateIntended = "allocate-intended",
    /// A device plugin is about to be asked for them.
    AllocateCall = "allocate-call",
    /// The device plugin has answered, and nobody else knows.
    AllocateAnswered = "allocate-answered",
    /// The plugins' answers are durable, and the pod has none.
    AllocateCommitted = "allocate-committed",
    /// A pod's devices are durably nobody's; the answer is not given.
    AllocateFreed = "allocate-freed",
    /// A driver's write below `/sys` is durable as an intent, and not made.
    SysfsWriteIntended = "sysfs-write-intended",
    /// It is made, and nobody knows.
    SysfsWritten = "sysfs-written",
    /// A value below `/sys` is about to be put back.
    PutBackBegun = "put-back-begun",
    /// It is put back, and nobody knows.
    PutBackWritten = "put-back-written",
    /// Every value of a released claim is put back, and the claim still has its record.
    ReleasePutBack = "release-put-back",
    /// The writer has put the changes into a transaction.
    CheckpointCommit = "checkpoint-commit",
    /// The transaction is durable, and those who wait for it do not know.
    CheckpointCommitted = "checkpoint-committed",
    /// A temporary CDI file is written.
    CdiStaged = "cdi-staged",
    CdiRenamed = "cdi-renamed",
    CdiRemoved = "cdi-removed",
    /// The CDI folder is synced, and those who wait for it do not know.
    CdiSynced = "cdi-synced",
}

/// What the daemon logs at start if it has fail points.
pub const HAS_FAIL_POINTS: &str = "this program has fail points";

#[cfg(feature = "failpoints")]
mod armed {
    use super::Point;

    /// Keeps the points armed while it lives.
    pub struct Armed(#[expect(dead_code, reason = "disarms when dropped")] fail::FailScenario<'static>);

    /// Arms the points that the variable `FAILPOINTS` names. In the language of the crate `fail`, `POINT=2*off->return` is death
    /// at the third pass.
    pub fn arm() -> Armed {
        let armed = Armed(fail::FailScenario::setup());
        let points: Vec<_> =
            fail::list().into_iter().map(|(point, action)| format!("{point}={action}")).collect();
        tracing::info!(?points, "{}", super::HAS_FAIL_POINTS);
        armed
    }

    /// Marks a pass through a point.
    pub fn pass(point: Point) {
        fail::fail_point!(point.name(), |_| die());
    }

    fn die() {
        use rustix::process::{Signal, getpid, kill_process};
        // The signal is not one that could be blocked, and ends the call that sends it.
        let sent = kill_process(getpid(), Signal::KILL);
        unreachable!("a process may kill itself: {sent:?}");
    }
}

#[cfg(feature = "failpoints")]
pub use armed::{Armed, arm, pass};

/// Marks a pass through a point.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn pass(_: Point) {}

#[cfg(test)]
mod tests {
    use super::Point;

    #[test]
    fn names_are_unique_and_need_no_quoting() {
        let names: std::collections::BTreeSet<_> = Point::ALL.iter().map(|point| point.name()).collect();
        assert_eq!(names.len(), Point::ALL.len());
        assert!(names.iter().all(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')));
    }
}
