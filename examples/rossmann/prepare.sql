-- Every step of the preparation, in the SQL that DataFusion and Spark share. A block is a name, what it is, and one
-- query; days(Date), the number of days since 1970, is what engines write differently.

-- sold: train and test under one another, so that every step is written once
SELECT 'train' AS Part, CAST(NULL AS INT) AS Id, Store, DayOfWeek, Date, Sales, Promo, StateHoliday, SchoolHoliday
FROM train
UNION ALL
SELECT 'test' AS Part, Id, Store, DayOfWeek, Date, CAST(NULL AS INT) AS Sales, Promo, StateHoliday, SchoolHoliday
FROM test;

-- dated: parts of the date, and flags: what is not '0' is true
SELECT
    Part, Id, Store, DayOfWeek, Date, Sales,
    days(Date) AS DayNumber,
    CAST(extract(YEAR FROM Date) AS INT) AS Year,
    CAST(extract(MONTH FROM Date) AS INT) AS Month,
    CAST(extract(WEEK FROM Date) AS INT) AS Week,
    CAST(extract(DAY FROM Date) AS INT) AS Day,
    Promo <> '0' AS Promo,
    StateHoliday <> '0' AS StateHoliday,
    SchoolHoliday <> '0' AS SchoolHoliday
FROM sold;

-- trends: of a state and week; the file of Lower Saxony is also that of Bremen
SELECT
    CASE WHEN State = 'NI' THEN 'HB,NI' ELSE State END AS State,
    CAST(extract(YEAR FROM Date) AS INT) AS Year,
    CAST(extract(WEEK FROM Date) AS INT) AS Week,
    trend
FROM (
    SELECT split_part(file, 'Rossmann_DE_', 2) AS State, CAST(split_part(week, ' -', 1) AS DATE) AS Date, trend
    FROM googletrend
    WHERE file <> 'Rossmann_DE'
) AS weeks;

-- trends_de: of the whole country
SELECT
    CAST(extract(YEAR FROM Date) AS INT) AS Year,
    CAST(extract(WEEK FROM Date) AS INT) AS Week,
    trend AS trend_de
FROM (
    SELECT CAST(split_part(week, ' -', 1) AS DATE) AS Date, trend FROM googletrend WHERE file = 'Rossmann_DE'
) AS weeks;

-- stores: with their states, and with what stands for a missing date
SELECT
    store.Store, State, StoreType, Assortment, CompetitionDistance, PromoInterval,
    coalesce(CompetitionOpenSinceYear, 1900) AS CompetitionOpenSinceYear,
    coalesce(CompetitionOpenSinceMonth, 1) AS CompetitionOpenSinceMonth,
    coalesce(Promo2SinceYear, 1900) AS Promo2SinceYear,
    coalesce(Promo2SinceWeek, 1) AS Promo2SinceWeek
FROM store JOIN store_states ON store.Store = store_states.Store;

-- since: competition counts from the middle of its month, the second promotion from the first day of its week
SELECT
    *,
    CAST(
        concat(CAST(CompetitionOpenSinceYear AS STRING), '-', lpad(CAST(CompetitionOpenSinceMonth AS STRING), 2, '0'), '-15')
        AS DATE
    ) AS CompetitionOpenSince,
    CAST(concat(CAST(Promo2SinceYear AS STRING), '-01-01') AS DATE) AS Promo2FirstOfYear
FROM stores;

-- climate: weather by state
SELECT
    State, Date, Max_TemperatureC, Mean_TemperatureC, Min_TemperatureC, Max_Humidity, Mean_Humidity, Min_Humidity,
    Max_Wind_SpeedKm_h, Mean_Wind_SpeedKm_h, CloudCover, Events,
    CAST(extract(YEAR FROM Date) AS INT) AS Year,
    CAST(extract(WEEK FROM Date) AS INT) AS Week
FROM weather JOIN state_names ON weather.file = state_names.StateName;

-- state_days: all that depends on state and day, in one small table, so that sales are joined with it once
SELECT
    climate.State, Date, Max_TemperatureC, Mean_TemperatureC, Min_TemperatureC, Max_Humidity, Mean_Humidity,
    Min_Humidity, Max_Wind_SpeedKm_h, Mean_Wind_SpeedKm_h, CloudCover, Events, trend, trend_de
FROM climate
JOIN trends ON climate.State = trends.State AND climate.Year = trends.Year AND climate.Week = trends.Week
JOIN trends_de ON climate.Year = trends_de.Year AND climate.Week = trends_de.Week;

-- flags: what was and what comes next, by store: the day of the last and of the next one, or the store's first and last
SELECT
    *,
    coalesce(max(CASE WHEN Promo THEN DayNumber END) OVER past, min(DayNumber) OVER past) AS LastPromo,
    coalesce(min(CASE WHEN Promo THEN DayNumber END) OVER future, max(DayNumber) OVER future) AS NextPromo,
    coalesce(max(CASE WHEN StateHoliday THEN DayNumber END) OVER past, min(DayNumber) OVER past) AS LastStateHoliday,
    coalesce(min(CASE WHEN StateHoliday THEN DayNumber END) OVER future, max(DayNumber) OVER future) AS NextStateHoliday,
    coalesce(max(CASE WHEN SchoolHoliday THEN DayNumber END) OVER past, min(DayNumber) OVER past) AS LastSchoolHoliday,
    coalesce(min(CASE WHEN SchoolHoliday THEN DayNumber END) OVER future, max(DayNumber) OVER future) AS NextSchoolHoliday
FROM dated
WINDOW
    past AS (PARTITION BY Store ORDER BY DayNumber ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW),
    future AS (PARTITION BY Store ORDER BY DayNumber ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING);

-- elapsed: days since the last one (never negative) and to the next one (never positive)
SELECT
    Part, Id, Store, DayOfWeek, Date, Sales, DayNumber, Year, Month, Week, Day, Promo, StateHoliday, SchoolHoliday,
    DayNumber - NextPromo AS BeforePromo,
    DayNumber - LastPromo AS AfterPromo,
    DayNumber - NextStateHoliday AS BeforeStateHoliday,
    DayNumber - LastStateHoliday AS AfterStateHoliday,
    DayNumber - NextSchoolHoliday AS BeforeSchoolHoliday,
    DayNumber - LastSchoolHoliday AS AfterSchoolHoliday
FROM flags;

-- with_stores: the first of two joins, each of which must keep every row
SELECT
    elapsed.*, State, StoreType, Assortment, CompetitionDistance, PromoInterval, CompetitionOpenSinceYear,
    Promo2SinceYear,
    CASE
        WHEN CompetitionOpenSinceYear > 1900 THEN greatest(0, least(720, DayNumber - days(CompetitionOpenSince))) ELSE 0
    END AS CompetitionDaysOpen,
    CASE
        WHEN Promo2SinceYear > 1900
        THEN greatest(0, least(175, DayNumber - days(Promo2FirstOfYear) - (Promo2SinceWeek - 1) * 7)) ELSE 0
    END AS Promo2Days
FROM elapsed JOIN since ON elapsed.Store = since.Store;

-- joined: with weather and trends
SELECT
    with_stores.*, Max_TemperatureC, Mean_TemperatureC, Min_TemperatureC, Max_Humidity, Mean_Humidity, Min_Humidity,
    Max_Wind_SpeedKm_h, Mean_Wind_SpeedKm_h, CloudCover, Events, trend, trend_de
FROM with_stores
JOIN state_days ON with_stores.State = state_days.State AND with_stores.Date = state_days.Date;

-- features: what the network sees; a missing category is the default of its type, a missing number is 0
SELECT
    Part, Id, Date, DayNumber, CAST(Sales AS FLOAT) AS Sales,
    Store, coalesce(State, '') AS State, coalesce(DayOfWeek, 0) AS DayOfWeek, Year, Month, Day, Week,
    CAST(floor(CompetitionDaysOpen / 30) AS INT) AS CompetitionMonthsOpen,
    CAST(floor(Promo2Days / 7) AS INT) AS Promo2Weeks,
    coalesce(StoreType, '') AS StoreType, coalesce(Assortment, '') AS Assortment,
    coalesce(PromoInterval, '') AS PromoInterval, CompetitionOpenSinceYear, Promo2SinceYear,
    coalesce(Events, '') AS Events, coalesce(Promo, FALSE) AS Promo, coalesce(StateHoliday, FALSE) AS StateHoliday,
    coalesce(SchoolHoliday, FALSE) AS SchoolHoliday,
    coalesce(CompetitionDistance, 0) AS CompetitionDistance,
    coalesce(Max_TemperatureC, 0) AS Max_TemperatureC,
    coalesce(Mean_TemperatureC, 0) AS Mean_TemperatureC,
    coalesce(Min_TemperatureC, 0) AS Min_TemperatureC,
    coalesce(Max_Humidity, 0) AS Max_Humidity,
    coalesce(Mean_Humidity, 0) AS Mean_Humidity,
    coalesce(Min_Humidity, 0) AS Min_Humidity,
    coalesce(Max_Wind_SpeedKm_h, 0) AS Max_Wind_SpeedKm_h,
    coalesce(Mean_Wind_SpeedKm_h, 0) AS Mean_Wind_SpeedKm_h,
    coalesce(CloudCover, 0) AS CloudCover,
    coalesce(trend, 0) AS trend,
    coalesce(trend_de, 0) AS trend_de,
    BeforePromo, AfterPromo, BeforeStateHoliday, AfterStateHoliday, BeforeSchoolHoliday, AfterSchoolHoliday
FROM joined
WHERE Part = 'test' OR Sales > 0;
