//! Points where a test crashes the daemon, at once, without unwinding, flushing or closing anything, and system calls that a test lets
//! fail. Without the feature `failpoints`, which no shipped build enables, they do nothing.

use strum::{IntoStaticStr, VariantArray};

/// A point between two steps, where a crash may prevent the second. Tests write its name into `FAILPOINTS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Point {
    /// The checkpoint has been read at start, and the CDI directory has not.
    CheckpointOpened,
    /// A lost checkpoint has been rebuilt at start; the claim manager does not exist yet.
    Recovered,
    /// A CDI file without a claim is about to be removed at start.
    OrphanFound,
    OrphanRemoved,
    /// A claim's CDI files are about to be compared with the checkpoint at start.
    ReconcileClaim,
    PrepareDecided,
    /// The intents are durable.
    PrepareIntended,
    PrepareCall,
    /// The driver has responded, and the result is in memory only.
    PrepareAnswered,
    /// The CDI files of a result exist; the result may be durable or not.
    PrepareFilesWritten,
    /// A result is durable; its CDI files may exist or not.
    PrepareCommitted,
    /// Results and files exist; the response is not sent.
    PrepareDone,
    /// The rollback of a permanently refused claim is durable as an intent.
    RollbackIntended,
    RollbackDone,
    UnprepareIntended,
    UnprepareCall,
    UnprepareAnswered,
    /// Every driver has unprepared the claim, and its CDI files are gone.
    UnprepareFilesRemoved,
    /// The record is deleted; the response is not sent.
    UnprepareForgotten,
    /// The metadata of a stored driver is written, and the driver's file is not.
    KeptStaged,
    /// The file of a new version is stored; the version does not serve yet.
    KeptWritten,
    /// A new version serves, and the previous version is not stopped yet.
    DriverSwitched,
    /// The version that prepared a claim is about to be called to unprepare it, since the serving version did not.
    PredecessorCall,
    /// That version has responded, and the result is in memory only.
    PredecessorAnswered,
    /// The file of a stored driver without claims is removed, and its metadata is not.
    KeptForgotten,
    /// A device plugin is about to be called to allocate devices.
    AllocateCall,
    /// The device plugin has responded, and the response is in memory only.
    AllocateAnswered,
    /// A decision about an adapter, or the state of its devices, is not durable yet.
    AdapterDecided,
    /// It is durable, and does not count yet.
    AdapterRecorded,
    /// A driver's write below `/sys` is durable as an intent, and not executed.
    SysfsWriteIntended,
    /// The write is executed, and recorded in memory only.
    SysfsWritten,
    /// A PCI function's `driver_override` is written, and the function keeps its kernel driver.
    BindOverridden,
    /// The function has no kernel driver.
    BindUnbound,
    /// The function has its new kernel driver, and that is recorded in memory only.
    BindProbed,
    /// The progress of a driver is durable, and the driver does not know yet.
    ProgressSaved,
    /// A value below `/sys` is about to be restored.
    PutBackBegun,
    /// The value is restored, and that is recorded in memory only.
    PutBackWritten,
    /// Every value of a released claim is restored, and the claim still has its record.
    ReleasePutBack,
    /// The writer has added the changes to a transaction.
    CheckpointCommit,
    /// The transaction is durable, and its waiting callers are not notified.
    CheckpointCommitted,
    /// A temporary CDI file is written.
    CdiStaged,
    CdiRenamed,
    CdiRemoved,
}

impl Point {
    pub const ALL: &[Self] = Self::VARIANTS;

    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Log line at start of a daemon with fail points.
pub const HAS_FAIL_POINTS: &str = "this program has fail points";

#[cfg(feature = "failpoints")]
mod armed {
    use super::Point;

    /// Guard that keeps the points armed.
    pub struct Armed(
        #[expect(dead_code, reason = "disarms when dropped")] fail::FailScenario<'static>,
    );

    /// Arms the points that the variable `FAILPOINTS` names. In the syntax of the crate `fail`, `POINT=2*off->return` crashes at the
    /// third pass.
    pub fn arm() -> Armed {
        let armed = Armed(fail::FailScenario::setup());
        let points: Vec<_> = fail::list()
            .into_iter()
            .map(|(point, action)| format!("{point}={action}"))
            .collect();
        tracing::info!(points = points.join(", "), "{}", super::HAS_FAIL_POINTS);
        armed
    }

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

/// Lets one system call of [`beneath`](crate::beneath) fail.
#[cfg(feature = "failpoints")]
mod failing {
    use parking_lot::Mutex;
    use rustix::io::Errno;

    static CALLS: Mutex<(usize, Option<(usize, Errno)>)> = Mutex::new((0, None));

    /// Counts calls from 0, and fails the one of this number.
    pub fn fail_system_call(number: usize, errno: Errno) {
        *CALLS.lock() = (0, Some((number, errno)));
    }

    /// Returns the number of calls since the last `fail_system_call`; no more call fails.
    pub fn system_calls() -> usize {
        let mut calls = CALLS.lock();
        calls.1 = None;
        calls.0
    }

    pub fn system_call() -> rustix::io::Result<()> {
        let mut calls = CALLS.lock();
        let number = calls.0;
        calls.0 += 1;
        match calls.1 {
            Some((failing, errno)) if failing == number => Err(errno),
            _ => Ok(()),
        }
    }
}

#[cfg(feature = "failpoints")]
pub use failing::{fail_system_call, system_call, system_calls};

/// Passed before each system call that may fail.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn system_call() -> rustix::io::Result<()> {
    Ok(())
}

#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn pass(_: Point) {}
