//! Which rows are wanted at all: comparisons of columns with values.
//!
//! - FI-1: a row passes if it passes every filter. A null or NaN passes none.

use crate::{Error, Result};
use arrow_array::{
    Array, ArrayRef, BooleanArray, Datum, Float64Array, Int64Array, RecordBatch, Scalar,
    StringArray, cast::AsArray, types::Float64Type,
};
use arrow_cast::{CastOptions, cast, cast_with_options};
use arrow_ord::cmp;
use arrow_schema::{ArrowError, DataType};
use arrow_select::filter::filter_record_batch;
use std::{fmt, sync::Arc};

/// How a column is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Operator {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    /// Equal to one of several values.
    In,
}

impl Operator {
    /// The operator that is written so.
    pub fn named(name: &str) -> Result<Self> {
        Ok(match name {
            "==" | "=" => Self::Equal,
            "!=" => Self::NotEqual,
            "<" => Self::Less,
            "<=" => Self::LessEqual,
            ">" => Self::Greater,
            ">=" => Self::GreaterEqual,
            "in" => Self::In,
            _ => {
                let known = "==, !=, <, <=, >, >= and in";
                return Err(Error::Invalid(format!(
                    "there is no comparison {name:?}: there are {known}"
                )));
            }
        })
    }
}

/// What a column is compared with. A date is written as text.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Value {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Text(value) => write!(f, "{value:?}"),
        }
    }
}

/// A condition on a column.
#[derive(Clone, Debug, PartialEq)]
pub struct Filter {
    /// Its name.
    pub column: String,
    /// How it is compared.
    pub operator: Operator,
    /// With what: one value, or several for [`Operator::In`].
    pub values: Vec<Value>,
}

impl Filter {
    /// The value as one of the column's type, and the type in which both are compared.
    fn scalar(&self, value: &Value, data: &DataType) -> Result<(ArrayRef, DataType)> {
        let data = match data {
            DataType::Dictionary(_, value) => value.as_ref(),
            other => other,
        };
        let compared = match value {
            Value::Float(_) if data.is_integer() => DataType::Float64,
            _ => data.clone(),
        };
        let array: ArrayRef = match value {
            Value::Bool(value) => Arc::new(BooleanArray::from(vec![*value])),
            Value::Int(value) => Arc::new(Int64Array::from(vec![*value])),
            Value::Float(value) => Arc::new(Float64Array::from(vec![*value])),
            Value::Text(value) => Arc::new(StringArray::from(vec![value.as_str()])),
        };
        let options = CastOptions { safe: false, ..CastOptions::default() };
        let kinds_differ =
            matches!(value, Value::Text(_)) && (data.is_numeric() || *data == DataType::Boolean);
        let scalar = match kinds_differ {
            true => Err(ArrowError::CastError("text is no number".into())),
            false => cast_with_options(&array, &compared, &options),
        };
        let failed = |error| {
            let column = &self.column;
            Error::Invalid(format!(
                "filter on column {column:?}: it is {data} and cannot be compared with {value}: {error}"
            ))
        };
        Ok((scalar.map_err(failed)?, compared))
    }

    fn compare(&self, operator: Operator, array: &ArrayRef, value: &Value) -> Result<BooleanArray> {
        let (scalar, compared) = self.scalar(value, array.data_type())?;
        let failed = |error: ArrowError| {
            Error::arrow(&format!("filter on column {:?}", self.column), &error)
        };
        let array = match *array.data_type() == compared {
            true => Arc::clone(array),
            false => cast(array, &compared).map_err(failed)?,
        };
        let (left, right): (&dyn Datum, Scalar<ArrayRef>) = (&array, Scalar::new(scalar));
        let compared = match operator {
            Operator::Equal | Operator::In => cmp::eq(left, &right),
            Operator::NotEqual => cmp::neq(left, &right),
            Operator::Less => cmp::lt(left, &right),
            Operator::LessEqual => cmp::lt_eq(left, &right),
            Operator::Greater => cmp::gt(left, &right),
            Operator::GreaterEqual => cmp::gt_eq(left, &right),
        };
        compared.map_err(failed)
    }

    /// Whether its column and values fit together.
    pub(crate) fn check(&self, data: &DataType) -> Result<()> {
        match (self.operator, self.values.len()) {
            (Operator::In, 1..) | (_, 1) => {}
            _ => {
                return Err(Error::Invalid(format!(
                    "filter on column {:?}: there is nothing to compare with",
                    self.column
                )));
            }
        }
        self.values.iter().try_for_each(|value| self.scalar(value, data).map(drop))
    }

    /// Clears the places of rows that do not pass.
    fn strike(&self, array: &ArrayRef, keep: &mut [bool]) -> Result<()> {
        let mut passed = vec![false; keep.len()];
        for value in &self.values {
            let compared = self.compare(self.operator, array, value)?;
            passed
                .iter_mut()
                .enumerate()
                .for_each(|(row, passed)| *passed |= compared.is_valid(row) && compared.value(row));
        }
        if array.data_type().is_floating() {
            let wide = cast(array, &DataType::Float64)
                .map_err(|error| Error::arrow(&self.column, &error))?;
            let values = wide.as_primitive::<Float64Type>().values();
            passed.iter_mut().zip(values).for_each(|(passed, value)| *passed &= !value.is_nan());
        }
        keep.iter_mut().zip(passed).for_each(|(keep, passed)| *keep &= passed);
        Ok(())
    }

    /// Which units may hold a row that passes, by the least and the largest value of each; null where nobody knows.
    pub(crate) fn possible(&self, least: &ArrayRef, most: &ArrayRef) -> Result<Vec<bool>> {
        let mut possible = vec![false; least.len()];
        let mut allow = |compared: &[BooleanArray]| {
            for (unit, possible) in possible.iter_mut().enumerate() {
                *possible |=
                    compared.iter().all(|compared| compared.is_null(unit) || compared.value(unit));
            }
        };
        for value in &self.values {
            match self.operator {
                Operator::Less | Operator::LessEqual => {
                    allow(&[self.compare(self.operator, least, value)?])
                }
                Operator::Greater | Operator::GreaterEqual => {
                    allow(&[self.compare(self.operator, most, value)?])
                }
                Operator::Equal | Operator::In => allow(&[
                    self.compare(Operator::LessEqual, least, value)?,
                    self.compare(Operator::GreaterEqual, most, value)?,
                ]),
                Operator::NotEqual => allow(&[]),
            }
        }
        Ok(possible)
    }
}

/// The rows of a batch that pass all filters.
pub(crate) fn apply(filters: &[Filter], batch: RecordBatch) -> Result<RecordBatch> {
    if filters.is_empty() {
        return Ok(batch);
    }
    let mut keep = vec![true; batch.num_rows()];
    for filter in filters {
        let missing = || Error::data(format!("column {:?}", filter.column), "it is missing");
        filter.strike(batch.column_by_name(&filter.column).ok_or_else(missing)?, &mut keep)?;
    }
    filter_record_batch(&batch, &BooleanArray::from(keep))
        .map_err(|error| Error::arrow("filters", &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{Date32Array, Int32Array};
    use proptest::prelude::*;

    fn filter(operator: &str, values: &[Value]) -> Filter {
        Filter {
            column: "x".into(),
            operator: Operator::named(operator).unwrap(),
            values: values.to_vec(),
        }
    }

    fn passing(filter: &Filter, array: ArrayRef) -> usize {
        let batch = RecordBatch::try_from_iter([("x", array)]).unwrap();
        apply(std::slice::from_ref(filter), batch).unwrap().num_rows()
    }

    #[test]
    fn nulls_and_nan_pass_nothing() {
        let array: ArrayRef =
            Arc::new(Float64Array::from(vec![Some(1.0), None, Some(f64::NAN), Some(3.0)]));
        for (operator, count) in [(">", 1), (">=", 1), ("<", 1), ("!=", 2), ("==", 0), ("<=", 1)] {
            assert_eq!(
                passing(&filter(operator, &[Value::Int(2)]), Arc::clone(&array)),
                count,
                "{operator}"
            );
        }
        assert_eq!(passing(&filter("in", &[Value::Int(1), Value::Float(3.0)]), array), 2);
    }

    #[test]
    fn values_take_the_type_of_the_column() {
        let days: ArrayRef = Arc::new(Date32Array::from(vec![0, 1, 365]));
        assert_eq!(passing(&filter(">=", &[Value::Text("1970-01-02".into())]), days), 2);
        let small: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3]));
        assert_eq!(passing(&filter(">", &[Value::Float(1.5)]), Arc::clone(&small)), 2);
        let error = filter("==", &[Value::Text("two".into())])
            .check(small.data_type())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(
                "filter on column \"x\": it is Int32 and cannot be compared with \"two\""
            ),
            "{error}"
        );
    }

    proptest! {
        #[test]
        fn what_passes_is_possible(
            values in prop::collection::vec(-5_i64..5, 1..20), operator in 0_usize..7, with in -6_i64..6,
        ) {
            let operator = ["==", "!=", "<", "<=", ">", ">=", "in"][operator];
            let filter = filter(operator, &[Value::Int(with)]);
            let bound = |bound: Option<&i64>| -> ArrayRef { Arc::new(Int64Array::from(vec![*bound.unwrap()])) };
            let possible = filter.possible(&bound(values.iter().min()), &bound(values.iter().max())).unwrap()[0];
            prop_assert!(possible || passing(&filter, Arc::new(Int64Array::from(values))) == 0);
        }
    }
}
