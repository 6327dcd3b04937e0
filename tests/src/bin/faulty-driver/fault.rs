//! Faults of a driver, and the case that finds each.

use clap::ValueEnum;

macro_rules! faults {
    ($($name:ident => $case:literal,)*) => {
        /// A fault; the documentation of its case says what is right.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
        pub(crate) enum Fault {
            $($name,)*
        }

        impl Fault {
            /// The case that finds it.
            fn case(self) -> &'static str {
                match self {
                    $(Self::$name => $case,)*
                }
            }
        }
    };
}

faults! {
    NeverRegisters => "wire.registers",
    OtherType => "wire.registers",
    ListensLate => "wire.endpoint",
    EndpointIsRelative => "wire.endpoint",
    NameWithUnderscore => "wire.name",
    ListsWhatItDoesNotServe => "wire.services",
    RefusesTheNotification => "wire.notified",
    RefusesEmptyCalls => "wire.empty",
    RefusesClaims => "wire.prepare",
    RefusesUnprepare => "wire.unprepare",
    AlwaysTheFirstDevice => "wire.devices",
    UnknownRequest => "wire.requests",
    UnqualifiedCdiName => "wire.cdi-ids",
    NoCdiFile => "wire.cdi-files",
    ForgetsAClaimOfSeveral => "wire.batch",
    AnswersForAStranger => "wire.batch-strangers",
    AnswersTwice => "wire.batch-strangers",
    OneRefusalFailsAll => "wire.batch-independent",
    V1beta1Differs => "idempotency.v1beta1",
    OtherAnswerTheSecondTime => "idempotency.prepare-twice",
    SecondPrepareRemovesTheFile => "idempotency.prepare-twice-files",
    OtherEditsTheSecondTime => "idempotency.same-edits",
    RefusesToUnprepareTheUnknown => "idempotency.unprepare-unknown",
    V1beta1RefusesToUnprepareTheUnknown => "idempotency.unprepare-unknown",
    RefusesTheSecondUnprepare => "idempotency.unprepare-twice",
    LeavesTheFile => "idempotency.unprepare-files",
    UnprepareReadsTheClaim => "idempotency.unprepare-without-object",
    StaysUnprepared => "idempotency.prepare-again",
    OtherAnswerAfterRestart => "idempotency.prepare-after-restart",
    LeavesTheFileAfterRestart => "idempotency.unprepare-after-restart",
    RefusesTheUnknownAfterRestart => "idempotency.unknown-after-restart",
    KeepsStaleSockets => "crash.registers-again",
    StoresAtTheEnd => "crash.after-prepare",
    StaysInPrepare => "crash.in-prepare",
    StaysInUnprepare => "crash.in-unprepare",
    NoFileAfterReboot => "crash.reboot",
    RefusesClaimsOfAnotherBoot => "crash.reboot",
    EditsOfTheBoot => "crash.reboot-edits",
    UnprepareNeedsTheFile => "crash.reboot-unprepare",
    EndsOnCorruptState => "crash.state-corrupt",
    EndsOnTruncatedState => "crash.state-truncated",
    IgnoresWriteErrors => "crash.state-read-only",
    UnprepareNeedsTheState => "crash.state-gone",
    SlicesForAllNodes => "slices.node",
    SlicesOfAnotherDriver => "slices.node",
    SlicesWithoutOwner => "slices.owner",
    CountsASliceTooMany => "slices.complete",
    WritesAnInvalidSlice => "slices.accepted",
    AllSlicesInvalid => "slices.accepted",
    OneDeviceInTwoSlices => "slices.unique",
    OtherNamesAtEachStart => "slices.names-stable",
    PoolOfTheBoot => "slices.reboot-names",
    DeletesItsSlicesAtStart => "slices.kept",
    WritesItsSlicesAtStart => "slices.quiet-restart",
    IgnoresDeletedSlices => "slices.wiped",
    IgnoresChangedSlices => "slices.repaired",
    GenerationFalls => "slices.generation",
    RepairsManyTimes => "slices.one-write",
    NoHealthList => "features.health-list",
    HealthOfAStranger => "features.health-devices",
    HealthListOnce => "features.health-again",
    OtherMetadata => "features.metadata",
    UnknownCounter => "features.counters",
    AdminAccessTakesTheDevice => "features.admin-access",
    ForgetsTheOtherInstance => "features.rolling-update",
    BusyWithMany => "conduct.at-once",
    OneClaimAtATime => "conduct.at-once",
    StuckAfterACancelledCall => "conduct.cancelled",
    RemembersApiErrors => "conduct.api-errors",
    HangsOnApiErrors => "conduct.api-errors",
    WaitsForTheApiForever => "conduct.slow-api",
    Polls => "conduct.quiet",
    LeaksMemory => "conduct.memory",
    LeaksFiles => "conduct.descriptors",
    IgnoresSigterm => "conduct.stops",
}

/// A line for each fault, with its case.
pub(crate) fn list() -> String {
    let line = |fault: &Fault| {
        let name = fault
            .to_possible_value()
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default();
        format!("{name} {}\n", fault.case())
    };
    Fault::value_variants().iter().map(line).collect()
}
