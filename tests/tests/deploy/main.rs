//! Checks of `deploy/`: objects that a cluster accepts, minimal rights, metrics that are served.

mod chart;
mod dashboard;
mod objects;
mod rights;
mod unit;
