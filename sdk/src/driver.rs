//! The traits that a driver implements.

use crate::{
    Claim, Context, DeviceHealth, DriverInfo, Host, Inventory, LiveClaim, Prepared, Problem, Trigger,
};

/// Outcomes of a batch by UID of the claim, in any order.
pub type Outcomes<T> = Vec<(String, Result<T, Problem>)>;

/// A device driver: plain functions from what the host tells and what the driver may read to answers.
///
/// The functions have no `self`: an instance may live for a single call, so there is nothing to keep. What must last goes into
/// the claim's memo, and what the operator says comes with the [`Context`].
pub trait Driver {
    /// Who the driver is and what it asks for. Called with nothing granted; it must need nothing.
    fn describe() -> DriverInfo;

    /// What there is on the node. Called at load, on kernel events, on a timer and on request; the host compares and publishes.
    ///
    /// # Errors
    ///
    /// Any problem; the host then goes on with the last inventory and shows the problem.
    fn discover(host: &Host, ctx: &Context, trigger: &Trigger) -> Result<Inventory, Problem>;

    /// Makes a claim's devices ready. May be repeated for a claim at any time, also after a crash in the middle, and must then come
    /// to the same end.
    ///
    /// # Errors
    ///
    /// The problem that is shown to whoever made the pod; its kind decides whether the host tries again.
    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem>;

    /// Gives a claim's devices back. May be repeated; an unknown claim is success. Does nothing unless implemented.
    ///
    /// # Errors
    ///
    /// The problem; the claim stays and the host tries again.
    fn unprepare(host: &Host, ctx: &Context, claim: &LiveClaim) -> Result<(), Problem> {
        let _ = (host, ctx, claim);
        Ok(())
    }

    /// Makes several claims ready. Unless implemented, one after the other by [`prepare`](Driver::prepare).
    fn prepare_batch(host: &Host, ctx: &Context, claims: &[Claim]) -> Outcomes<Prepared> {
        claims.iter().map(|claim| (claim.id.uid.clone(), Self::prepare(host, ctx, claim))).collect()
    }

    /// Gives several claims back. Unless implemented, one after the other by [`unprepare`](Driver::unprepare).
    fn unprepare_batch(host: &Host, ctx: &Context, claims: &[LiveClaim]) -> Outcomes<()> {
        claims.iter().map(|live| (live.claim.id.uid.clone(), Self::unprepare(host, ctx, live))).collect()
    }
}

/// Optional: schemas and checks for what people write. Named in [`export_driver!`](crate::export_driver).
pub trait Configuration: Driver {
    /// JSON Schema of the operator's config.
    fn config_schema() -> Option<String> {
        None
    }

    /// JSON Schema of the parameters in claims and classes.
    fn parameters_schema() -> Option<String> {
        None
    }

    /// Checks the operator's config (JSON) beyond what a schema can say; [`parse_json`](crate::parse_json) is a good beginning.
    ///
    /// # Errors
    ///
    /// `invalid`, saying what is wrong and where.
    fn validate_config(config: &str) -> Result<(), Problem> {
        let _ = config;
        Ok(())
    }

    /// Checks parameters of a claim or class (JSON) beyond what a schema can say.
    ///
    /// # Errors
    ///
    /// `invalid`, saying what is wrong and where.
    fn validate_parameters(parameters: &str) -> Result<(), Problem> {
        let _ = parameters;
        Ok(())
    }
}

/// Optional: health of devices, asked for on a timer and on kernel events. Named in [`export_driver!`](crate::export_driver).
pub trait Health: Driver {
    /// How the devices are doing. Those that are not named are as they were.
    ///
    /// # Errors
    ///
    /// Any problem; the host then counts the health of all devices as unknown after a while.
    fn check(host: &Host, ctx: &Context) -> Result<Vec<DeviceHealth>, Problem>;
}
