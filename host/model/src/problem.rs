//! Why a request failed, in terms that an operator can act on.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use strum::{Display, EnumIter, IntoEnumIterator, IntoStaticStr};

/// Kind of a problem, with the names of the driver contract and the node API.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Display, IntoStaticStr,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum ProblemKind {
    /// The request can never succeed unchanged.
    Invalid,
    /// Forbidden by a grant or a rule.
    Denied,
    /// Something named in the request does not exist.
    NotFound,
    /// The device is in use by another claim.
    Conflict,
    /// Temporarily not possible.
    Unavailable,
    /// A defect of the driver, or of the host.
    Internal,
}

impl ProblemKind {
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns whether the same request can succeed later.
    pub fn is_permanent(self) -> bool {
        matches!(self, Self::Invalid | Self::Denied | Self::NotFound)
    }
}

/// Codes of the host's own problems and conditions, written with dashes: `claim-in-use`. They are stable: operators and scripts compare
/// them. A driver's problems have codes of its own, as texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Display, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ProblemCode {
    AdapterConflict,
    AdapterInvalid,
    AdapterParameters,
    AdapterUnknown,
    AdapterWithoutPlugin,
    AllocationChanged,
    AllocationNodeInvalid,
    AllocationPathDenied,
    AllocationPathMissing,
    ApiConflict,
    ApiExpired,
    ApiForbidden,
    ApiIdentityReplaced,
    ApiNotFound,
    ApiNotServed,
    ApiRefused,
    ApiServerBusy,
    ApiServerUnreachable,
    BadGlob,
    BadPath,
    BadRequest,
    BadValue,
    BindFailed,
    CdiDeviceClaimedTwice,
    CdiDeviceMissing,
    CdiFileForeign,
    CdiNotRead,
    CdiNotRemoved,
    CdiNotValid,
    CdiNotWritten,
    CdiSpecConflict,
    CdiSpecInvalid,
    CheckpointDiskFull,
    CheckpointMissing,
    CheckpointReadOnly,
    CheckpointRecordsUnreadable,
    CheckpointSetAside,
    CheckpointSlow,
    CheckpointUnavailable,
    ClaimAmbiguous,
    ClaimAnsweredTwice,
    ClaimDevicesGone,
    ClaimDriverGone,
    ClaimInUse,
    ClaimMalformed,
    ClaimName,
    ClaimNameInvalid,
    ClaimNamedTwice,
    ClaimNotAllocated,
    ClaimNotRead,
    ClaimNotReserved,
    ClaimOfAnotherPod,
    ClaimOnAnotherNode,
    ClaimParametersMalformed,
    ClaimReplaced,
    ClaimSkipped,
    ClaimStatusForbidden,
    ClaimStatusUnwritable,
    ClaimTooLarge,
    ClaimUnpreparing,
    ClaimsFolderUnreadable,
    CompileCpu,
    CompileFailed,
    CompileMemory,
    CompileTime,
    CompiledTooLarge,
    CompilerKilled,
    Composed,
    ConfigNeedsRestart,
    ConfigRefused,
    ContractTypes,
    ContractVersion,
    DaemonCrashed,
    DaemonStopping,
    DescribeFailed,
    DescriptionRefused,
    DeviceAskedTwice,
    DeviceClassConflict,
    DeviceClassFileInvalid,
    DeviceClassMissing,
    DeviceHeld,
    CounterExceeded,
    CapacityExceeded,
    IncompatibleGroups,
    DeviceId,
    DeviceListFaulty,
    DeviceNodeMoved,
    DevicePluginRefused,
    DeviceUnknown,
    DevicesLeftOut,
    DevicesNotGivenUp,
    DevicesUnhealthy,
    DriverAnswerNotValid,
    DriverAnswerTooLarge,
    DriverBusy,
    DriverCallStuck,
    DriverCpuLimit,
    DriverDeadline,
    DriverDistrusted,
    DriverExited,
    DriverFailed,
    DriverFileOpen,
    DriverFileShadowed,
    DriverHandlesLimit,
    DriverInstancesLimit,
    DriverMemoriesLimit,
    DriverMemoryLimit,
    DriverNameTaken,
    DriverNative,
    DriverNotAsked,
    DriverNotConnected,
    DriverNotKept,
    DriverNotQuarantined,
    DriverNotRegistered,
    DriverNotServing,
    DriverNotTaken,
    DriverQuarantined,
    DriverRefused,
    DriverTableElementsLimit,
    DriverTablesLimit,
    DriverTrapped,
    DriverUnavailable,
    DriverUnknown,
    DriverWithoutClaims,
    DriverWithoutService,
    DriversFolderOpen,
    EditDenied,
    EditInvalid,
    EditSourceUnsafe,
    EndpointMissing,
    EndpointNotValid,
    EndpointUnreadable,
    EventsForbidden,
    ExtendedResourceWithheld,
    FileEmpty,
    FileStuck,
    FileTooLarge,
    FunctionInUse,
    GivenUp,
    GlobTooWide,
    GrantRevoked,
    HandingOver,
    HostCallLimit,
    HostFailed,
    Interrupted,
    IoError,
    KubeletAway,
    KubeletFolder,
    KubeletRefusedDriver,
    KubeletSocket,
    ListenFailed,
    MetadataAttributes,
    MetadataNotWritten,
    MetadataPath,
    MissingExports,
    NeverAllowed,
    NoCode,
    NoContract,
    NoHealthyDevice,
    NoIommu,
    NoSuchClaim,
    NoSuchContainer,
    NoSuchDevice,
    NoSuchKernelDriver,
    NoSuchNode,
    NoSuchPath,
    NoSuchPod,
    NoSuchPool,
    NoValue,
    NodeNameKept,
    NodeNameLeft,
    NodeObjectMissing,
    NodeObjectUnreadable,
    NominatedPodsUnreadable,
    NotADriver,
    NotAFile,
    NotADirectory,
    NotALink,
    NotANode,
    NotGranted,
    NotPublic,
    NotJson,
    NotKept,
    NotNow,
    NotPermitted,
    NotText,
    NotWasm,
    OutsideSysfs,
    PathGone,
    PathReplaced,
    PluginGone,
    PluginNotRegistered,
    PodNotPrepared,
    PodResourcesAway,
    PodUidTaken,
    PreferenceFailed,
    Precompiled,
    PredecessorDamaged,
    PredecessorDistrusted,
    PredecessorMissing,
    PredecessorNotLoaded,
    PredecessorNotRead,
    PutBackOutOfTime,
    RegistrationSuperseded,
    RequestChanged,
    ResourceBusy,
    ResourceNotValid,
    ResourceOfKubelet,
    ResourceTaken,
    ResourceUnknown,
    SchemaInvalid,
    SchemaViolated,
    SliceFieldsDropped,
    SlicesContested,
    SlicesKept,
    SlicesNotWritten,
    SlicesRefused,
    SysfsStuck,
    TaintRulesLeftOut,
    TooComplex,
    TooFewDevices,
    TooManyContainers,
    TooManyDevices,
    TooManyEntries,
    TooManyNames,
    TooManyReloads,
    TooManyResources,
    TooManyValues,
    UnknownImports,
    ValueChanged,
    ValueLeft,
    ValueOfAnotherClaim,
    ValueOfAnotherDriver,
    ValueReadsOtherwise,
    ValueTooLarge,
    ValueUnknown,
    ValueUnreadable,
    VersionNotSupported,
    WasmInvalid,
    WasmText,
    WasmTruncated,
}

impl ProblemCode {
    /// All codes, in alphabetical order.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::iter()
    }

    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl From<ProblemCode> for String {
    fn from(code: ProblemCode) -> Self {
        code.as_str().to_owned()
    }
}

impl PartialEq<&str> for ProblemCode {
    fn eq(&self, code: &&str) -> bool {
        self.as_str() == *code
    }
}

impl PartialEq<ProblemCode> for String {
    fn eq(&self, code: &ProblemCode) -> bool {
        self == code.as_str()
    }
}

/// A problem: kind, code, message, and when to retry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    pub kind: ProblemKind,
    /// A [`ProblemCode`], or a driver's own: lower-case words with dashes, at most 63 bytes.
    pub code: String,
    /// One sentence, at most 1 KiB.
    pub message: String,
    /// Milliseconds until the retry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u32>,
    /// Facts for logs and `explain`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<(String, String)>,
}

impl Problem {
    pub fn new(kind: ProblemKind, code: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            kind,
            code: code.into(),
            message: message.into(),
            retry_after_ms: None,
            details: Vec::new(),
        }
    }

    pub fn invalid(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Invalid, code, message)
    }

    pub fn denied(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Denied, code, message)
    }

    pub fn not_found(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::NotFound, code, message)
    }

    pub fn conflict(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Conflict, code, message)
    }

    pub fn unavailable(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Unavailable, code, message)
    }

    pub fn internal(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Internal, code, message)
    }

    #[must_use]
    pub fn with(mut self, key: &str, value: impl fmt::Display) -> Self {
        self.details.push((key.to_owned(), value.to_string()));
        self
    }

    #[must_use]
    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after_ms = Some(u32::try_from(delay.as_millis()).unwrap_or(u32::MAX));
        self
    }
}
