//! Points where a test crashes the daemon: at once, without unwinding, flushing or closing anything. Without the feature
//! `failpoints`, which no shipped build enables, they do nothing.

crate::worded! {
    /// A point between two steps, where a crash may prevent the second; tests write its name into `FAILPOINTS`.
    Point {
    /// At start: the checkpoint is read, the CDI directory is not.
    CheckpointOpened = "checkpoint-opened",
    /// At start: a lost checkpoint is rebuilt; the claim manager does not exist yet.
    Recovered = "recovered",
    /// At start: before the removal of a CDI file without a claim.
    OrphanFound = "orphan-found",
    OrphanRemoved = "orphan-removed",
    /// At start: before the comparison of a claim's CDI files with the checkpoint.
    ReconcileClaim = "reconcile-claim",
    PrepareDecided = "prepare-decided",
    /// The intents are durable.
    PrepareIntended = "prepare-intended",
    PrepareCall = "prepare-call",
    /// The driver has responded, and the result is in memory only.
    PrepareAnswered = "prepare-answered",
    /// The CDI files of a result exist; the result may be durable or not.
    PrepareFilesWritten = "prepare-files-written",
    /// A result is durable; its CDI files may exist or not.
    PrepareCommitted = "prepare-committed",
    /// Results and files exist; the response is not sent.
    PrepareDone = "prepare-done",
    /// The rollback of a permanently refused claim is durable as an intent.
    RollbackIntended = "rollback-intended",
    RollbackDone = "rollback-done",
    UnprepareIntended = "unprepare-intended",
    UnprepareCall = "unprepare-call",
    UnprepareAnswered = "unprepare-answered",
    /// Every driver has unprepared the claim, and its CDI files are gone.
    UnprepareFilesRemoved = "unprepare-files-removed",
    /// The record is deleted; the response is not sent.
    UnprepareForgotten = "unprepare-forgotten",
    /// The metadata of a stored driver is written, and the driver's file is not.
    KeptStaged = "kept-staged",
    /// The file of a new version is stored; the version does not serve yet.
    KeptWritten = "kept-written",
    /// A new version serves, and the previous version is not stopped yet.
    DriverSwitched = "driver-switched",
    /// Before the call of the version that prepared a claim to unprepare it, since the serving version did not.
    PredecessorCall = "predecessor-call",
    /// That version has responded, and the result is in memory only.
    PredecessorAnswered = "predecessor-answered",
    /// The file of a stored driver without claims is removed, and its metadata is not.
    KeptForgotten = "kept-forgotten",
    /// Devices of extended resources are chosen for a pod, and that is durable.
    AllocateIntended = "allocate-intended",
    /// Before the call of a device plugin to allocate them.
    AllocateCall = "allocate-call",
    /// The device plugin has responded, and the response is in memory only.
    AllocateAnswered = "allocate-answered",
    /// The plugins' responses are durable, and the response to the pod is not sent.
    AllocateCommitted = "allocate-committed",
    /// The release of a pod's devices is durable; the response is not sent.
    AllocateFreed = "allocate-freed",
    /// A driver's write below `/sys` is durable as an intent, and not executed.
    SysfsWriteIntended = "sysfs-write-intended",
    /// The write is executed, and recorded in memory only.
    SysfsWritten = "sysfs-written",
    /// Before the restore of a value below `/sys`.
    PutBackBegun = "put-back-begun",
    /// The value is restored, and that is recorded in memory only.
    PutBackWritten = "put-back-written",
    /// Every value of a released claim is restored, and the claim still has its record.
    ReleasePutBack = "release-put-back",
    /// The writer has added the changes to a transaction.
    CheckpointCommit = "checkpoint-commit",
    /// The transaction is durable, and its waiting callers are not notified.
    CheckpointCommitted = "checkpoint-committed",
    /// A temporary CDI file is written.
    CdiStaged = "cdi-staged",
    CdiRenamed = "cdi-renamed",
    CdiRemoved = "cdi-removed",
    /// The CDI directory is synced, and the waiting callers are not notified.
    CdiSynced = "cdi-synced",
    }
}

/// Log line at start of a daemon with fail points.
pub const HAS_FAIL_POINTS: &str = "this program has fail points";

#[cfg(feature = "failpoints")]
mod armed {
    use super::Point;

    /// Guard that keeps the points armed.
    pub struct Armed(#[expect(dead_code, reason = "disarms when dropped")] fail::FailScenario<'static>);

    /// Arms the points that the variable `FAILPOINTS` names. In the syntax of the crate `fail`, `POINT=2*off->return` crashes at the
    /// third pass.
    pub fn arm() -> Armed {
        let armed = Armed(fail::FailScenario::setup());
        let points: Vec<_> =
            fail::list().into_iter().map(|(point, action)| format!("{point}={action}")).collect();
        tracing::info!(?points, "{}", super::HAS_FAIL_POINTS);
        armed
    }

    /// Passes a point.
    pub fn pass(point: Point) {
        fail::fail_point!(point.as_str(), |_| die());
    }

    fn die() {
        use rustix::process::{Signal, getpid, kill_process};
        // The signal cannot be blocked, and the call that sends it does not return.
        let sent = kill_process(getpid(), Signal::KILL);
        unreachable!("a process may kill itself: {sent:?}");
    }
}

#[cfg(feature = "failpoints")]
pub use armed::{Armed, arm, pass};

/// Passes a point.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn pass(_: Point) {}

#[cfg(test)]
mod tests {
    use super::Point;

    #[test]
    fn names_are_unique_and_need_no_quoting() {
        let names: std::collections::BTreeSet<_> = Point::ALL.iter().map(|point| point.as_str()).collect();
        assert_eq!(names.len(), Point::ALL.len());
        assert!(names.iter().all(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')));
    }
}
